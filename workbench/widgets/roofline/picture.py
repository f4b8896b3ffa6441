"""A roofline drawn: slopes of memory, flats of arithmetic, and for each work what it could be and what it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import chain

from workbench import svg
from workbench.svg import CHARACTER_WIDTH, Axis, Scale, format_percent, format_seconds, format_tick
from workbench.widgets.roofline.data import Roof, RooflinePoint, Roofs

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 780, 420, 64, 16, 16, 44
X, Y = Axis("FLOPs a byte", log=True), Axis("FLOP/s", log=True)
MARGIN_FACTOR = 3.0  # how many times beyond what it holds the picture reaches
LINE_HEIGHT = 14
MAX_NAMED_POINTS = 12  # of more points the places in the table stand at the marks
LABEL_OFFSETS = ((9, 4), (9, -8), (9, 16), (-9, 4), (-9, -8), (-9, 16), (9, 28), (-9, 28), (9, -20), (-9, -20))


def build_scales(points: Sequence[RooflinePoint], roofs: Roofs, width: float = WIDTH) -> tuple[Scale, Scale]:
    """From FLOPs a byte and FLOP/s to pixels: all points, and where slopes and flats meet."""
    knees = [gemm.rate / read.rate for gemm in roofs.gemms for read in roofs.reads]
    across = [point.intensity for point in points] + knees
    up = list(chain.from_iterable((point.rate, point.predicted_rate) for point in points))
    up = [rate for rate in up if rate] + [gemm.rate for gemm in roofs.gemms]
    lowest = min(across, default=1.0) / MARGIN_FACTOR
    if not points:
        up += [read.rate * lowest for read in roofs.reads]
    wide = Scale.over([lowest, max(across, default=1.0) * MARGIN_FACTOR], LEFT, width - RIGHT, X)
    high = Scale.over(
        [min(up, default=1.0) / MARGIN_FACTOR, max(up, default=1.0) * MARGIN_FACTOR], HEIGHT - BOTTOM, TOP, Y
    )
    return wide, high


def draw_roofline(
    points: Sequence[RooflinePoint], roofs: Roofs, chosen: int | None = None, width: float = WIDTH
) -> str:
    """Points that compute nothing have no place on a logarithm and stand in the table only."""
    drawn = [(place, point) for place, point in enumerate(points) if point.flops > 0 and point.bytes > 0]
    across, up = build_scales([point for _, point in drawn], roofs, width)
    axes = (
        *svg.x_axis(across, X, up.end, up.begin, max(4, int(width / 100))),
        *svg.y_axis(up, Y, across.begin, across.end, 8),
    )
    parts = [*axes, *_roofs(across, up, roofs)]
    marks = [(across(p.intensity), up(rate)) for _, p in drawn for rate in (p.rate, p.predicted_rate) if rate]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in marks]
    for place, point in drawn:
        label = point.name if len(drawn) <= MAX_NAMED_POINTS else str(place + 1)
        parts += _point(
            across, up, point, place, label, taken, width, first=place == drawn[0][0], chosen=place == chosen
        )
    title = f"Roofline: {len(points)} works under {len(roofs.reads)} levels of memory and {len(roofs.gemms)} precisions"
    return svg.document(width, HEIGHT, *parts, title=title)


def draw_table(points: Sequence[RooflinePoint], chosen: int | None = None) -> str:
    heads = ("", "work", "FLOPs", "bytes", "FLOPs a byte", "predicted", "measured", "of the roof", "which binds")
    rows = "".join(_row(point, place, place == chosen) for place, point in enumerate(points))
    label = "".join(f"<th>{head}</th>" for head in heads)
    return f"<table style='border-spacing:10px 1px'><tr>{label}</tr>{rows}</table>"


def _row(point: RooflinePoint, place: int, chosen: bool) -> str:
    share = format_percent(point.predicted / point.seconds) if point.predicted and point.seconds else "–"
    cells = (
        format_tick(point.flops), format_tick(point.bytes), format_tick(point.intensity) if point.bytes else "–",
        format_seconds(point.predicted), format_seconds(point.seconds), share, point.bound.name if point.bound else "–",
    )  # fmt: skip
    name = f"▸ <b>{escape(point.name)}</b>" if chosen else escape(point.name)
    label = "".join(f"<td style='text-align:right;white-space:nowrap'>{escape(cell)}</td>" for cell in cells)
    return f"<tr><td>{place + 1}</td><td style='text-align:left'>{name}</td>{label}</tr>"


def _roofs(across: Scale, up: Scale, roofs: Roofs) -> list[str]:
    """Each slope rises to the highest flat; each flat begins at the steepest slope."""
    parts = []
    top = max((gemm.rate for gemm in roofs.gemms), default=up.high)
    steepest = max((read.rate for read in roofs.reads), default=None)
    tilt = math.atan2(up(10) - up(1), across(10) - across(1))
    for read in roofs.reads:
        start, knee = max(across.low, up.low / read.rate), min(top / read.rate, across.high)
        if start >= knee:
            continue
        ends = (across(start), up(start * read.rate)), (across(knee), up(knee * read.rate))
        label = f"{read.name}: {format_tick(read.rate)}B/s"
        parts.append(svg.path(ends, stroke_width=1.5, tip=_describe_roof(read, "bytes a second"), data_roof="read"))
        along = ends[0][0] + 12, ends[0][1] + 12 * math.tan(tilt) - 7
        at = f"translate({along[0]:.1f},{along[1]:.1f}) rotate({math.degrees(tilt):.1f})"
        parts.append(svg.text(0, 0, label, transform=at, class_="faint"))
    for place, gemm in enumerate(roofs.gemms):
        start = across.low if steepest is None else max(across.low, gemm.rate / steepest)
        dash = ("", "7 3", "2 3")[place % 3] or None
        ends = (across(start), up(gemm.rate)), (across.end, up(gemm.rate))
        tip = _describe_roof(gemm, "FLOP/s")
        parts.append(svg.path(ends, stroke_width=1.5, tip=tip, data_roof="gemm", stroke_dasharray=dash))
        label = f"{gemm.name}: {format_tick(gemm.rate)}FLOP/s"
        parts.append(svg.text(across.end - 4, up(gemm.rate) - 5, label, text_anchor="end", class_="faint"))
    return parts


def _describe_roof(roof: Roof, unit: str) -> str:
    return f"{roof.name}: {roof.rate:,.4g} {unit}. {roof.note}".strip()


def _point(
    across: Scale,
    up: Scale,
    point: RooflinePoint,
    place: int,
    label: str,
    taken: list,
    width: float,
    first: bool,
    chosen: bool,
) -> list[str]:
    """Hollow where it could be, filled where it was, and a line between."""
    x, hue, parts = across(point.intensity), point.series % len(svg.SERIES_COLOURS), []
    ends = [up(rate) for rate in (point.predicted_rate, point.rate) if rate]
    if len(ends) == 2:
        parts.append(svg.line(x, ends[0], x, ends[1], class_=f"l{hue}", stroke_width=1.5))
    if point.predicted_rate:
        parts.append(svg.circle(x, ends[0], 5, class_=f"l{hue}", stroke_width=2, data_mark="predicted"))
    if point.rate:
        parts.append(svg.circle(x, ends[-1], 5, class_=f"c{hue}", data_mark="measured"))
    if chosen:
        parts.append(svg.circle(x, ends[-1], 9, class_="line", stroke_width=1.5))
    places = LABEL_OFFSETS if point.rate else LABEL_OFFSETS[2:]  # beside a mark on a roof runs the roof
    parts += _label(x, ends[-1], label, taken, places, width) if ends else []
    return [svg.group(*parts, tip=_describe_point(point), key=str(place), tabindex=0 if first else -1)]


def _label(x: float, y: float, name: str, taken: list, places: Sequence[tuple[int, int]], width: float) -> list[str]:
    """The name beside its mark, where nothing else stands; else nowhere: hovering tells it, and the table."""
    wide = CHARACTER_WIDTH * len(name)
    for right, down in places:
        left = x + right if right > 0 else x + right - wide
        box = left, y + down - LINE_HEIGHT + 3, left + wide, y + down + 3
        if box[0] < LEFT or box[2] > width or any(svg.boxes_overlap(box, each) for each in taken):
            continue
        taken.append(box)
        return [svg.text(x + right, y + down, name, text_anchor="start" if right > 0 else "end")]
    return []


def _describe_point(point: RooflinePoint) -> str:
    label = (
        f"{point.name}: {format_tick(point.flops)} FLOPs, {format_tick(point.bytes)} bytes, "
        f"{point.intensity:.3g} a byte"
    )
    if point.seconds:
        label += f"; measured {format_seconds(point.seconds)}, {format_tick(point.flops / point.seconds)}FLOP/s"
    if point.predicted and point.bound:
        label += f"; predicted {format_seconds(point.predicted)}, {point.bound.name} binds"
    return f"{label}. {point.note}".strip()
