"""Draw lines over numbers or names, one line for each series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.figures.axis import channel, data
from workbench.figures.figure import DASHES, GREY, HEIGHT, SHAPES, WIDTH, Figure, View
from workbench.svg import Axis
from workbench.units import format_number

MAX_POINTS = 1500  # maximum points of a line, more than a screen has columns


@dataclass(frozen=True)
class Series:
    """One line of a chart; `marked` shows its points too, and `dashed` marks it as a model's prediction."""

    name: str
    points: tuple[tuple[float, float], ...]
    marked: bool = True
    dashed: bool = False


def lines(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    title: str = "",
    *,
    width: float = WIDTH,
    height: float = HEIGHT,
    even: float | None = None,
    zero: bool = False,
) -> Figure:
    """Draw one line for each series; points that a logarithmic axis cannot show are left out.

    Args:
        series: the lines. Series of one name share a colour; names differ by colour, dash and mark.
        x: the horizontal axis; with `names`, points are at 0, 1, ... of these.
        y: the axis of values.
        title: text above the plot.
        width: width of the plot in pixels.
        height: height of the plot in pixels.
        even: a value to compare with, drawn as a grey line.
        zero: whether the axis of values begins at 0.
    """
    names = list(dict.fromkeys(each.name for each in series))
    predicts = any(each.dashed for each in series)
    rows, points = [], []
    for line, each in enumerate(series):
        for order, (a, b) in enumerate(_thinned([p for p in each.points if x.shows(p[0]) and y.shows(p[1])])):
            place = x.names[int(a)] if x.names else a
            words = f"{each.name}: {x.title} {place if x.names else format_number(a)}, {y.title} {format_number(b)}"
            kind = "predicted" if each.dashed else "measured"
            row = {"x": place, "y": b, "series": each.name, "kind": kind, "line": line, "order": order, "tip": words}
            rows.append(row)
            points += [row] if each.marked else []
    heights = [row["y"] for row in rows] + ([] if even is None else [even])
    across, up = channel("x", x, [] if x.names else [row["x"] for row in rows]), channel("y", y, heights, zero)
    legend = {"title": None} if len(names) > 1 else None
    # Vega-Lite merges legends of equal domains.
    colour: View = {"field": "series", "type": "nominal", "sort": names, "scale": {"domain": names}, "legend": legend}
    dash: View = {**colour, "scale": {"domain": names, "range": DASHES}}
    if predicts:
        dash = {
            "field": "kind",
            "type": "nominal",
            "title": None,
            "scale": {"domain": ["measured", "predicted"], "range": [[1, 0], [5, 4]]},
        }
    line_view = {
        "data": data(rows),
        "mark": {"type": "line", "strokeWidth": 1.6},
        "encoding": {"color": colour, "strokeDash": dash, "detail": {"field": "line"}, "order": {"field": "order"}},
    }
    shape = {**colour, "scale": {"domain": names, "range": list(SHAPES)}} | ({"legend": None} if predicts else {})
    faint = {"condition": {"test": "datum.kind == 'predicted'", "value": 0.4}, "value": 1}
    dots = {
        "data": data(points),
        "mark": {"type": "point", "filled": True, "size": 36},
        "encoding": {"color": colour, "shape": shape, "opacity": faint, "description": {"field": "tip"}},
    }
    flat = {
        "data": data([{"y": even}]),
        "mark": {"type": "rule", "color": GREY, "strokeDash": [4, 4]},
        "encoding": {"y": up},
    }
    layers: list[View] = [*([flat] if even is not None else []), line_view, *([dots] if points else [])]
    for each_layer in layers[even is not None :]:
        each_layer["encoding"] |= {"x": across, "y": up}
    return Figure({"title": title, "width": width, "height": height, "layer": layers})


def _thinned(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the lowest and the highest of neighbouring points, so that a line with many points keeps its peaks."""
    if len(points) <= MAX_POINTS:
        yield from points
        return
    size = 2 * len(points) / MAX_POINTS
    for part in (points[int(n * size) : int((n + 1) * size)] for n in range(MAX_POINTS // 2)):
        ends = {id(each): each for each in (min(part, key=_height), max(part, key=_height))}
        yield from sorted(ends.values())


def _height(point: tuple[float, float]) -> float:
    return point[1]
