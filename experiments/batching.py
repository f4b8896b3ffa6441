"""Figures of `batching.yaml`: continuous batching against static batches, and batches against requests alone."""

from __future__ import annotations

from itertools import pairwise

from workbench.experiment.verdict import VariantRows, variant_row

SIZES = ("at most 1", "at most 2", "at most 4", "at most 8", "continuous")
RATE = "output_tokens_per_s"


def joining(rows: VariantRows) -> dict[str, float]:
    """Return ratios of the same requests, all there at once, outputs of exponentially distributed lengths, at most 16
    run: tokens a second over those of a batch whose ended rows leave it, and of a padded batch, whose ended rows are
    computed until its last ends; the median TTFT and E2EL over those of the former."""
    static, padded, continuous = (variant_row(rows, name) for name in ("static", "padded", "continuous"))
    return {
        "throughput_times": continuous[RATE] / static[RATE],
        "throughput_times_padded": continuous[RATE] / padded[RATE],
        "ttft_p50_times": continuous["ttft_s_p50"] / static["ttft_s_p50"],
        "e2el_p50_times": continuous["e2el_s_p50"] / static["e2el_s_p50"],
        "ttft_p99_times": continuous["ttft_s_p99"] / static["ttft_s_p99"],
    }


def amortised(rows: VariantRows) -> dict[str, float]:
    """Return the growth of tokens a second from 1 to 16 at once, whether they grow with every doubling, and the growth
    of the time per output token. (E2EL includes the waiting time, which falls as the queue moves faster.)"""
    found = [variant_row(rows, name) for name in SIZES]
    return {
        "throughput_times": found[-1][RATE] / found[0][RATE],
        "grows_each_time": all(after[RATE] > before[RATE] for before, after in pairwise(found)),
        "tpot_times": found[-1]["tpot_s_p50"] / found[0]["tpot_s_p50"],
        "e2el_p50_times": found[-1]["e2el_s_p50"] / found[0]["e2el_s_p50"],
    }
