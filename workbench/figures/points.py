"""Draw named points by two measures, with their Pareto front if it is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.figures.axis import channel, data, ends, showable
from workbench.figures.figure import GREY, HEIGHT, SHAPES, WIDTH, Figure, View
from workbench.figures.labels import place_labels
from workbench.svg import SERIES_COLOURS, Axis, Scale
from workbench.units import format_number

FRONT, LOG_RATIO = SERIES_COLOURS[2], 10.0  # an axis is logarithmic if the ratio of its ends is larger


@dataclass(frozen=True)
class Point:
    """One point with its name; `group` determines its colour and shape. A point without a name has no label."""

    name: str
    x: float
    y: float
    group: str = ""
    front: bool = False


def points(
    given: Sequence[Point],
    x: Axis,
    y: Axis,
    title: str = "",
    *,
    width: float = WIDTH,
    height: float = HEIGHT,
    step: str = "step-after",
    x_zero: bool = False,
    y_zero: bool = False,
    y_labels: str = "",
) -> Figure:
    """Draw points with their names next to them, placed so that they cover neither each other nor a point.

    Points of the front are green and joined, all other points grey. Without a front all points are green, or with
    groups each group has its own colour and shape.

    Args:
        given: the points.
        x: the horizontal axis.
        y: the vertical axis.
        title: text above the plot.
        width: width of the plot in pixels.
        height: height of the plot in pixels.
        step: how the front's points are joined: the corner of the region that each dominates.
        x_zero: whether the horizontal axis begins at 0.
        y_zero: whether the vertical axis begins at 0.
        y_labels: a Vega expression of the labels of the vertical axis.
    """
    given = showable(showable(given, x, "x"), y, "y")
    across = channel("x", x, [each.x for each in given], x_zero)
    up = channel("y", y, [each.y for each in given], y_zero)
    if y_labels:
        up["axis"]["labelExpr"] = y_labels
    groups = [name for name in dict.fromkeys(each.group for each in given) if name]
    rows = [
        {
            "x": each.x,
            "y": each.y,
            "group": each.group,
            "front": each.front,
            "tip": f"{each.name or each.group}: {x.title} {format_number(each.x)}, {y.title} {format_number(each.y)}",
        }
        for each in given
    ]
    has_front = any(each.front for each in given)
    plain = GREY if has_front else FRONT
    look: View = {"color": {"condition": {"test": "datum.front", "value": FRONT}, "value": plain}}
    if groups:
        shared = {"field": "group", "type": "nominal", "sort": groups, "title": None}
        look = {"color": shared, "shape": {**shared, "scale": {"range": list(SHAPES)}}}
    place = {"x": across, "y": up}
    dots = {
        "data": data(rows),
        "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
        "encoding": {**place, **look, "description": {"field": "tip"}},
    }
    front = {
        "data": data([row for row in rows if row["front"]]),
        "mark": {"type": "line", "color": FRONT, "strokeWidth": 1, "interpolate": step},
        "encoding": {**place, "order": {"field": "x", "type": "quantitative"}},
    }
    named = [each for each in given if each.name]
    scales = (_scale([p.x for p in given], x, 0, width, x_zero), _scale([p.y for p in given], y, height, 0, y_zero))
    pixels = [(scales[0](each.x), scales[1](each.y)) for each in named]
    words = [
        {
            "data": data([{"x": each.x, "y": each.y, "name": each.name}]),
            "mark": {"type": "text", "align": "right" if label.left else "left", "dx": label.dx, "dy": label.dy},
            "encoding": {**place, "text": {"field": "name"}},
        }
        for each, label in zip(named, place_labels(pixels, [each.name for each in named], width), strict=True)
    ]
    layers = [*([front] if has_front else []), dots, *words]
    return Figure({"title": title, "width": width, "height": height, "layer": layers})


def spread_axis(title: str, values: Sequence[float]) -> Axis:
    """Return an axis for values, logarithmic if they differ by more than a factor of ten."""
    least, most = min(values), max(values)
    return Axis(title, log=least > 0 and math.isfinite(most) and most / least > LOG_RATIO)


def _scale(values: Sequence[float], axis: Axis, begin: float, end: float, zero: bool) -> Scale:
    low, high, _ = ends(values, axis, zero)
    return Scale(low, high, begin, end, axis.log)
