"""Figures of `no_cache.yaml`: decoding without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.prefill_decode_length import exponents
from workbench.experiment.verdict import VariantRows, variant_row

SHORT = 256  # tokens from which on a step without the cache is more than its own overhead


def growth_of_steps(rows: VariantRows) -> dict[str, float]:
    """Return the powers of the length with which a decode step's time goes from 256 tokens on, with the cache and
    without, and by how much they differ; how many times as long a step takes without, at the longest text. The naive
    loop, and what was predicted, beside it. (The products of every token, linear, hide the square of attention until
    texts are long.)"""
    cached, anew, naive = (variant_row(rows, name)["curve"] for name in ("cache", "no cache", "naive"))
    with_cache, without = _slope(cached, "decode_step_s"), _slope(anew, "decode_step_s")
    return {
        "power_with_cache": with_cache,
        "power_without": without,
        "power_difference": without - with_cache,
        "times_without": anew[-1]["decode_step_s"] / cached[-1]["decode_step_s"],
        "predicted_power_with_cache": _slope(cached, "predicted_decode_step_s"),
        "predicted_power_without": _slope(anew, "predicted_decode_step_s"),
        "power_of_naive_loop": _slope(naive, "decode_step_s"),
        "times_of_naive_loop": naive[-1]["decode_step_s"] / cached[-1]["decode_step_s"],
        "tokens": cached[-1]["prompt_tokens"],
    }


def _slope(points: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the exponent from `SHORT` tokens to the longest."""
    ends = [next(p for p in points if p["prompt_tokens"] == SHORT), points[-1]]
    return exponents(ends, key)[0][2]
