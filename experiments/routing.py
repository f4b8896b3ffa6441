"""Figures of `routing.yaml`: prefix-aware routing of Mooncake's conversations."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row


def blind_over_aware(rows: VariantRows) -> dict[str, float]:
    """Return TTFT where the least loaded instance is taken, over that where the prefix decides: median and p99; the
    share of prompt tokens from the cache by policy; and p99 where a conversation is bound to its instance."""
    blind, aware, sticky = (variant_row(rows, name) for name in ("least loaded", "prefix aware", "session sticky"))
    return {
        "ttft_p50_times": blind["ttft_s_p50"] / aware["ttft_s_p50"],
        "ttft_p99_times": blind["ttft_s_p99"] / aware["ttft_s_p99"],
        "cache_hit_rate_least_loaded": blind["cache_hit_rate"],
        "cache_hit_rate_prefix_aware": aware["cache_hit_rate"],
        "ttft_p99_times_sticky": sticky["ttft_s_p99"] / aware["ttft_s_p99"],
    }
