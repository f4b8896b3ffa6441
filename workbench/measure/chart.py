"""Draw the chart of a comparison: quality loss of the variants against their bytes, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.figures.figure import Figure
from workbench.figures.points import Point, points
from workbench.runs.measures import measure_of
from workbench.runs.metrics import pareto_frontier
from workbench.svg import Axis

SIZES = {"bytes_per_token": "bytes of cache per token (measured)", "weight_bytes": "bytes of weights (measured)"}
MIN_KL = 1e-10  # smaller divergences are rounding errors and count as 0


def axis_title(name: str) -> str:
    """Return the heading of a measure with its unit: `TTFT p50, s`."""
    measure = measure_of(name)
    return measure.heading + (f", {measure.unit}" if measure.unit not in ("", "of 1") else "")


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw `kl_mean` against `bytes_per_token`, or against `weight_bytes` if only the weights differ.

    Both axes are logarithmic and the Pareto front is joined by a line. A KL divergence of zero is drawn at the bottom,
    below the smallest positive one."""
    sized = max(SIZES, key=lambda key: len({row.get(key) for row in rows}))
    places = [(float(row[sized]), float(row["kl_mean"])) for row in rows]
    best = set(pareto_frontier(places))
    bottom = 10.0 ** (math.ceil(math.log10(min((kl for _, kl in places if kl > MIN_KL), default=MIN_KL))) - 1)
    names: dict[tuple[float, float, bool], str] = {}  # variants at the same point share one label with all their names
    for index, (row, (size, kl)) in enumerate(zip(rows, places, strict=True)):
        key = size, max(kl, bottom), index in best
        names[key] = f"{names[key]}, {row['variant']}" if key in names else row["variant"]
    return points(
        [Point(name, size, kl, front=is_best) for (size, kl, is_best), name in names.items()],
        Axis(SIZES[sized], log=True),
        Axis("mean KL divergence from float32, nats", log=True),
        title,
        width=560,
        height=340,
        y_labels=f"datum.value <= {1.01 * bottom} ? '0' : format(datum.value, '.0e')",
    )
