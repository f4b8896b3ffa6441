"""Figures of `agent.yaml`: the share of its prompt that a later round of an agent computes, and of a cold start's
TTFT."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row


def warm_rounds(rows: VariantRows) -> dict[str, float]:
    """Return the share of prompt tokens computed in all rounds, with the prefix cache against without, and TTFT of
    later rounds against a cold start of the same requests; the latter without the cache too."""
    kept, computed = variant_row(rows, "kept"), variant_row(rows, "computed")
    return {
        "computed_share": kept["computed_tokens_per_question"] / computed["computed_tokens_per_question"],
        "ttft_share": kept["later_ttft_s"] / kept["later_cold_ttft_s"],
        "ttft_share_without_cache": computed["later_ttft_s"] / computed["later_cold_ttft_s"],
    }
