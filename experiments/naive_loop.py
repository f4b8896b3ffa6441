"""Figures of `naive_loop.yaml`: the series of optimizations from the naive loop to all of them together."""

from __future__ import annotations

from itertools import pairwise

from workbench.experiment.verdict import VariantRows, variant_row

LADDER = ("naive loop", "+ cache", "+ compiled step", "+ INT8 weights", "+ batch of 16", "+ drafts")
RATE = "output_tokens_per_s"


def ladder(rows: VariantRows) -> dict[str, float]:
    """Return the best rung's tokens a second over those of the naive loop, the least gain of a rung over the one
    before, and every rung's gain, measured and as bounded by the cost model."""
    rates = [variant_row(rows, name)[RATE] for name in LADDER]
    bounds = [variant_row(rows, name)["predicted"][RATE] for name in LADDER]
    gains = [after / before for before, after in pairwise(rates)]
    each = {name: gain for name, gain in zip(LADDER[1:], gains, strict=True)}
    bound = {f"{name}, bound": b / a for name, (a, b) in zip(LADDER[1:], pairwise(bounds), strict=True)}
    return {"throughput_times": max(rates) / rates[0], "least_gain_of_a_rung": min(gains), **each, **bound}
