"""Draw a roofline: slopes of memory, flats of arithmetic, and each point's attainable and measured rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from markupsafe import Markup

from workbench.figures.axis import channel, data
from workbench.figures.figure import SHAPES, Figure, View
from workbench.figures.labels import GAP, LETTER, LINE, place_labels
from workbench.svg import SERIES_COLOURS, Axis, Box, Scale, format_tick
from workbench.units import UNKNOWN, format_bytes, format_percent, format_quantity, format_seconds
from workbench.widgets.model_graph.roofline import PHASES, RooflinePoint, Roofs
from workbench.widgets.table import draw_table

WIDTH, HEIGHT = 700, 360
GROUPS = (*PHASES, "other")  # by a point's series
X, Y = Axis("FLOPs a byte", log=True), Axis("FLOP/s", log=True)
MARGIN_FACTOR = 3.0  # margin of the logarithmic axes beyond their values, as a factor
Place = tuple[float, float]  # x and y in pixels
MAX_NAMED_POINTS = 12  # with more points, their marks show row numbers of the table instead of names


def draw_roofline(
    points: Sequence[RooflinePoint], roofs: Roofs, chosen: int | None = None, width: float = WIDTH
) -> Figure:
    """Draw points under their roofs: a hollow mark at the attainable rate, a filled one at the measured rate.

    Points without FLOPs have no place on a logarithmic axis and are in the table only. A mark's key is its point's
    index."""
    drawn = [(place, point) for place, point in enumerate(points) if point.flops > 0 and point.bytes > 0]
    ends = _ends([point for _, point in drawn], roofs)
    x, y = channel("x", X, ends[0]), channel("y", Y, ends[1])
    scales = Scale.over(ends[0], 0, width, X), Scale.over(ends[1], HEIGHT, 0, Y)
    rows, keys = [], {}
    for place, point in drawn:
        words = _describe_point(point)
        keys[words] = str(place)
        rates = [rate for rate in (point.rate, point.predicted_rate) if rate]
        row = {"x": point.intensity, "predicted": point.predicted_rate, "measured": point.rate, "words": words}
        label = point.name if len(drawn) <= MAX_NAMED_POINTS else str(place + 1)
        rows += (
            [row | {"y": rates[0], "group": GROUPS[point.series], "name": label, "chosen": place == chosen}]
            if rates
            else []
        )
    present = sorted({row["group"] for row in rows}, key=GROUPS.index)
    legend = {"title": None} if len(present) > 1 else None
    group: View = {"field": "group", "type": "nominal", "legend": legend}
    places = [GROUPS.index(each) for each in present]
    colours, shapes = ([of[place] for place in places] for of in (SERIES_COLOURS, SHAPES))
    colour: View = {**group, "scale": {"domain": present, "range": colours}}
    at: View = {"x": x, "color": colour, "shape": {**group, "scale": {"domain": present, "range": shapes}}}
    lines, taken = _roofs(scales, roofs)
    layers = [
        *lines,
        {
            "data": data([row for row in rows if row["predicted"] and row["measured"]]),
            "mark": {"type": "rule", "opacity": 1},
            "encoding": {"x": x, "color": colour, "y": {**y, "field": "predicted"}, "y2": {"field": "measured"}},
        },
        {
            "data": data([row for row in rows if row["predicted"]]),
            "mark": {"type": "point", "size": 80, "opacity": 1, "aria": False},
            "encoding": {**at, "y": {**y, "field": "predicted"}},
        },
        {
            "data": data([row for row in rows if row["chosen"]]),
            "mark": {"type": "point", "size": 300, "aria": False},
            "encoding": {"x": x, "y": y},
        },
        {
            "data": data(rows),
            "mark": {"type": "point", "filled": True, "size": 80},
            "encoding": {
                **at,
                "y": y,
                "description": {"field": "words"},
                "opacity": {"condition": {"test": "datum.measured > 0", "value": 1}, "value": 0},
            },
        },
    ]
    pixels = [(scales[0](row["x"]), scales[1](row["y"])) for row in rows]
    for (x_at, y_at), row in zip(pixels, rows, strict=True):
        if row["predicted"]:
            other = scales[1](row["predicted"])
            taken.append((x_at - 1, min(y_at, other), x_at + 1, max(y_at, other)))
    for row, label in zip(rows, place_labels(pixels, [row["name"] for row in rows], width, taken), strict=True):
        mark = {"type": "text", "align": "right" if label.left else "left", "dx": label.dx, "dy": label.dy}
        layers.append({"data": data([row]), "mark": mark, "encoding": {"x": x, "y": y, "text": {"field": "name"}}})
    return Figure({"width": width, "height": HEIGHT, "layer": layers}, keys)


def _ends(points: Sequence[RooflinePoint], roofs: Roofs) -> tuple[list[float], list[float]]:
    """Return the ends of both axes, so that they hold all points and the intersections of slopes and flats."""
    knees = [gemm.rate / read.rate for gemm in roofs.gemms for read in roofs.reads]
    across = [point.intensity for point in points] + knees
    up = [rate for rate in chain.from_iterable((each.rate, each.predicted_rate) for each in points) if rate]
    up += [gemm.rate for gemm in roofs.gemms]
    lowest = min(across, default=1.0) / MARGIN_FACTOR
    if not points:
        up += [read.rate * lowest for read in roofs.reads]
    highest = MARGIN_FACTOR * max(up, default=1.0)
    return [lowest, max(across, default=1.0) * MARGIN_FACTOR], [min(up, default=1.0) / MARGIN_FACTOR, highest]


def _roofs(scales: tuple[Scale, Scale], roofs: Roofs) -> tuple[list[View], list[Box]]:
    """Draw the roofs: each slope rises to the highest flat; each flat begins at the steepest slope. Of several slopes,
    or flats, the lowest has its label below. Return their layers, and the boxes that they cover, in pixels."""
    across, up = scales
    layers: list[View] = []
    top = max((gemm.rate for gemm in roofs.gemms), default=up.high)
    steepest = max((read.rate for read in roofs.reads), default=None)
    tilt = math.degrees(math.atan2(up(10) - up(1), across(10) - across(1))) % 360
    x, y = channel("x", X, [across.low * 1.1, across.high / 1.1]), channel("y", Y, [up.low * 1.1, up.high / 1.1])
    ends, taken = [], list[Box]()
    lowest = [min(each, key=lambda roof: roof.rate) for each in (roofs.reads, roofs.gemms) if len(each) > 1]
    for read in roofs.reads:
        start, knee = max(across.low, up.low / read.rate), min(top / read.rate, across.high)
        if start < knee:
            label = f"{read.name}: {format_bytes(read.rate)}/s"
            ends.append((read, "bytes a second", start, knee, start * read.rate, knee * read.rate, label, tilt, "left"))
    for gemm in roofs.gemms:
        start = across.low if steepest is None else max(across.low, gemm.rate / steepest)
        label = f"{gemm.name}: {format_quantity(gemm.rate, 'FLOP/s')}"
        ends.append((gemm, "FLOP/s", start, across.high, gemm.rate, gemm.rate, label, 0.0, "right"))
    for number, (roof, unit, begin, end, low, high, label, angle, align) in enumerate(ends):
        words = f"{roof.name}: {roof.rate:,.4g} {unit}. {roof.note}".strip()
        line = {"x": begin, "y": low, "x2": end, "y2": high, "words": words, "name": label}
        dash = [[1, 0], [7, 3], [2, 3]][number % 3] if unit == "FLOP/s" else [1, 0]
        beyond = {"x2": {"field": "x2"}, "y2": {"field": "y2"}}
        rule = {"type": "rule", "aria": True, "strokeDash": dash, "strokeWidth": 1.5}
        encoding = {"x": x, "y": y, **beyond, "description": {"field": "words"}}
        layers.append({"data": data([line]), "mark": rule, "encoding": encoding})
        place = line if align == "left" else line | {"x": end, "y": high}
        above = 9 if roof in lowest else -7
        mark = {"type": "text", "align": align, "angle": angle, "dx": 8 if align == "left" else -4, "dy": above}
        encoding = {"x": x, "y": y, "text": {"field": "name"}}
        layers.append({"data": data([place]), "mark": mark | {"opacity": 0.7}, "encoding": encoding})
        taken += _boxes((across(begin), up(low)), (across(end), up(high)), len(label), align == "left", above)
    return layers, taken


def _boxes(begin: Place, end: Place, letters: int, at_begin: bool, above: float) -> list[Box]:
    """Return small boxes along a line from `begin` to `end`, and along its label, `above` pixels from the line."""
    length = math.dist(begin, end)
    count, words = max(1, round(length / GAP)), LETTER * letters + GAP
    boxes = []
    for number in range(count + 1):
        share = number / count
        x, y = (low + share * (high - low) for low, high in zip(begin, end, strict=True))
        boxes.append((x - 1, y - 1, x + 1, y + 1))
        if length * (share if at_begin else 1 - share) < words:
            boxes.append((x - GAP / 2, y + above - LINE / 2, x + GAP / 2, y + above + LINE / 2))
    return boxes


def draw_points(points: Sequence[RooflinePoint], chosen: int | None = None) -> str:
    """Draw a table of the points."""
    heads = ("", "work", "FLOPs", "bytes", "FLOPs a byte", "predicted", "measured", "of the roof", "which binds")
    return draw_table(heads, [_row(point, place, place == chosen) for place, point in enumerate(points)], ("work",))


def _row(point: RooflinePoint, place: int, chosen: bool) -> Sequence[object]:
    return (
        str(place + 1), Markup("▸ <b>{}</b>").format(point.name) if chosen else point.name, format_tick(point.flops),
        format_bytes(point.bytes), format_tick(point.intensity) if point.bytes else UNKNOWN,
        format_seconds(point.predicted), format_seconds(point.seconds),
        format_percent(point.predicted / point.seconds) if point.predicted and point.seconds else UNKNOWN,
        point.bound.name if point.bound else UNKNOWN,
    )  # fmt: skip


def _describe_point(point: RooflinePoint) -> str:
    label = (
        f"{point.name}: {format_quantity(point.flops, 'FLOPs')}, {format_bytes(point.bytes)}, "
        f"{point.intensity:.3g} a byte"
    )
    if point.seconds:
        label += f"; measured {format_seconds(point.seconds)}, {format_quantity(point.flops / point.seconds, 'FLOP/s')}"
    if point.predicted and point.bound:
        label += f"; predicted {format_seconds(point.predicted)}, {point.bound.name} binds"
    return f"{label}. {point.note}".strip()
