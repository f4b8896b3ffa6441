"""Figures of `paging_waste.yaml`: pages against reserved memory."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row


def paged(rows: VariantRows) -> dict[str, float]:
    """Return the share of the pages of 16 in use that lies empty, the same where each request reserves the longest
    text, and sequences and tokens a second relative to that (Azure's lengths, Llama 3.1 8B on a simulated H100)."""
    whole, pages = variant_row(rows, "the longest text reserved"), variant_row(rows, "pages of 16")
    return {
        "empty_share": pages["cache_waste"],
        "sequences_times": pages["sequences_mean"] / whole["sequences_mean"],
        "empty_share_reserved": whole["cache_waste"],
        "throughput_times": pages["output_tokens_per_s"] / whole["output_tokens_per_s"],
    }
