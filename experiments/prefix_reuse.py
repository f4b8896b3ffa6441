"""Figures of `prefix_reuse.yaml`: shared prefixes, computed and reused."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row


def latency(rows: VariantRows) -> dict[str, float]:
    """Return how many times as quick TTFT is for requests whose first 1,000 of 1,024 tokens stand in the cache, against
    computing them; the share saved; the tokens from the cache; and whether the output is the same."""
    computed, reused = variant_row(rows, "computed"), variant_row(rows, "reused")
    times = computed["ttft_s"] / reused["ttft_s"]
    return {
        "ttft_times_as_quick": times,
        "ttft_saved": 1 - 1 / times,
        "cached_tokens": reused["cached_tokens"],
        "same_tokens": reused["same_tokens"],
    }


def throughput(rows: VariantRows) -> dict[str, float]:
    """Return requests a second, all at once, none computed before: with reuse over without."""
    return {"throughput_times": variant_row(rows, "reused")["requests_per_s"]
            / variant_row(rows, "computed")["requests_per_s"]}  # fmt: skip
