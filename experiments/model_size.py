"""Figures of `model_size.yaml`: the size of a model at batch 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from experiments.prefill_decode_length import BOUND, TRIVIAL
from workbench.experiment.verdict import VariantRows

NAMES = ("demo-draft", "demo", "smollm2-135m", "tinyllama-1.1b")


def latency(rows: VariantRows) -> dict[str, float]:
    """Return the powers of the parameters with which the latency of one request goes: the smallest and the largest
    between neighbours in size, and in all; predicted, too, and of a decode step."""
    found = sorted((row for row in rows if row["variant"] in NAMES), key=lambda row: row["parameters"])
    sizes = [row["parameters"] for row in found]
    figures = powers_between(sizes, [row["curve"][0]["e2el_s"] for row in found])
    for key in ("predicted_e2el_s", "decode_step_s"):
        times = [row["curve"][0][key] for row in found]
        figures |= {f"{name}, {key}": value for name, value in powers_between(sizes, times).items()}
    return figures


def powers_between(sizes: Sequence[float], times: Sequence[float]) -> dict[str, float]:
    """Return the smallest and the largest exponent of size with which time grows between neighbours, and that in
    all."""
    pairs = zip(pairwise(sizes), pairwise(times), strict=True)
    powers = [_power(*ends, *spans) for ends, spans in pairs]
    whole = _power(sizes[0], sizes[-1], times[0], times[-1])
    return {"smallest_power": min(powers), "largest_power": max(powers), "power_in_all": whole}


def bandwidth_bound(rows: VariantRows) -> dict[str, float]:
    """Return for how many shapes, in one sequence of bfloat16, reading takes at least half of a decode step at the
    measured read ceiling and at most 10% of the FLOP/s ceiling is used; for how many not; and the shares read."""
    points = {row["variant"]: row["curve"][0] for row in rows if row["variant"] in NAMES}
    so = sum(p["decode_bytes_share"] >= BOUND and p["decode_flops_share"] <= TRIVIAL for p in points.values())
    reads = {f"share of the read ceiling, {name}": point["decode_bytes_share"] for name, point in points.items()}
    return {"bound_shapes": so, "other_shapes": len(points) - so, **reads}


def _power(small: float, large: float, soon: float, late: float) -> float:
    return math.log(late / soon) / math.log(large / small)
