"""Chart of a comparison: quality loss of the variants against their bytes, with the Pareto frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.study.labels import place_labels

SIZES = {"bytes_per_token": "bytes of cache a token (measured)", "weight_bytes": "bytes of weights (measured)"}
MIN_KL = 1e-10  # what is below is no distance: rounding
FRONTIER_COLOR, DOMINATED_COLOR = "#0b6e4f", "#a8a8a8"
WIDTH, HEIGHT = 560, 340  # of the plot, in pixels


def pareto_frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the non-dominated points, in order of the first coordinate.

    A point is dominated if another is as small in both coordinates and smaller in one."""
    best: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if not best or points[index][1] < points[best[-1]][1] or points[index] == points[best[-1]]:
            best.append(index)
    return best


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Draw an Altair chart of `kl_mean` against `bytes_per_token`, or against `weight_bytes` where only these differ.

    Both axes are logarithmic and the Pareto frontier is joined. A KL of zero is drawn at the bottom, below the smallest
    positive one."""
    altair = import_altair()
    sized = max(SIZES, key=lambda key: len({row.get(key) for row in rows}))
    points = [(float(row[sized]), float(row["kl_mean"])) for row in rows]
    best = set(pareto_frontier(points))
    some = [kl for _, kl in points if kl > MIN_KL] or [MIN_KL]
    bottom, top = 10.0 ** (math.ceil(math.log10(min(some))) - 1), 10.0 ** (math.floor(math.log10(max(some))) + 1)
    decades = [10.0**power for power in range(round(math.log10(bottom)), round(math.log10(top)) + 1)]
    axis = altair.Axis(values=decades, labelExpr=f"datum.value <= {bottom} ? '0' : format(datum.value, '.0e')")
    sizes = [x for x, _ in points]
    left, right = 0.85 * min(sizes), 1.3 * max(sizes)
    x = altair.X(
        "bytes:Q", title=SIZES[sized], axis=altair.Axis(values=_round_numbers(left, right)),
        scale=altair.Scale(type="log", domain=[left, right], nice=False),
    )  # fmt: skip
    y = altair.Y(
        "kl:Q", title="mean KL divergence from float32, nats", axis=axis,
        scale=altair.Scale(type="log", domain=[bottom, top], nice=False),
    )  # fmt: skip
    names: dict[tuple[float, float, bool], str] = {}  # points that are one bear their names together
    for index, (row, (size, kl)) in enumerate(zip(rows, points, strict=True)):
        key = size, max(kl, bottom), index in best
        names[key] = f"{names[key]}, {row['variant']}" if key in names else row["variant"]
    pixels = [
        (WIDTH * math.log(size / left) / math.log(right / left), HEIGHT * math.log(top / kl) / math.log(top / bottom))
        for size, kl, _ in names
    ]
    values = [
        {"variant": name, "bytes": size, "kl": kl, "best": is_best} for (size, kl, is_best), name in names.items()
    ]
    everything = altair.Chart(altair.Data(values=values)).encode(x=x, y=y)
    dots = everything.mark_point(filled=True, size=70, opacity=1).encode(
        color=altair.condition("datum.best", altair.value(FRONTIER_COLOR), altair.value(DOMINATED_COLOR))
    )
    line = everything.transform_filter("datum.best").mark_line(color=FRONTIER_COLOR, strokeWidth=1, interpolate="step-after")
    texts = [
        altair.Chart(altair.Data(values=[value]))
        .mark_text(align="right" if label.left else "left", dx=label.dx, dy=label.dy, fontSize=11)
        .encode(x=x, y=y, text="variant:N")
        for value, label in zip(values, place_labels(pixels, list(names.values()), WIDTH), strict=True)
    ]
    shown = altair.layer(line.encode(order=altair.Order("bytes:Q")), dots, *texts)
    return shown.properties(width=WIDTH, height=HEIGHT, title=title)


def _round_numbers(least: float, most: float) -> list[float]:
    """Return 1, 1.5, 2, 3, 5 and 7 of every decade between the two bounds."""
    decades = range(math.floor(math.log10(least)), math.floor(math.log10(most)) + 1)
    numbers = (step * 10.0**power for power in decades for step in (1, 1.5, 2, 3, 5, 7))
    return [number for number in numbers if least <= number <= most]


def svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart(rows, title).to_json())


def png(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(chart(rows, title).to_json(), scale=2)


def plotting_problem() -> str | None:
    """Return the reason why no chart can be drawn here; None where one can."""
    try:
        import_altair()
        import vl_convert  # noqa: F401
    except WorkbenchError as error:
        return str(error)
    except ImportError:
        return "pictures need vl-convert-python; pip install 'inference-workbench[plots]'"
    return None


def import_altair() -> Any:
    try:
        import altair
    except ImportError:
        raise WorkbenchError("pictures need altair; pip install 'inference-workbench[plots]'") from None
    return altair
