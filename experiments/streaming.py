"""Figures of `streaming.yaml`: texts to a client whole at the end, and token by token."""

from __future__ import annotations

from statistics import median

from workbench.experiment.verdict import VariantRows, variant_row

RATE = "predicted_output_tokens_per_s"


def overhead(rows: VariantRows) -> dict[str, float]:
    """Return output tokens a second without streaming over those with it, in the median of the rounds, and the number
    of rounds without a gain; the gain predicted from microseconds of handling a token."""
    whole, stream = variant_row(rows, "whole"), variant_row(rows, "stream")
    gains = [ends / streams for ends, streams in zip(whole["rates"], stream["rates"], strict=True)]
    return {
        "throughput_times": median(gains),
        "rounds_without_gain": sum(each <= 1 for each in gains),
        "least_gain": min(gains),
        "largest_gain": max(gains),
        "predicted_throughput_times": whole[RATE] / stream[RATE],
        "handling_us_per_token": (stream["handling_s_per_token"] - whole["handling_s_per_token"]) * 1e6,
    }


def perceived(rows: VariantRows) -> dict[str, float]:
    """Return what a client in a process of its own sees, in the median, with streaming over without: the time of the
    last text, and of the first."""
    whole, stream = variant_row(rows, "whole"), variant_row(rows, "stream")
    return {
        "last_text_times": stream["e2el_s_p50"] / whole["e2el_s_p50"],
        "first_text_share": stream["visible_s_p50"] / whole["visible_s_p50"],
    }
