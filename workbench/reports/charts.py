"""Small SVG charts whose colours come from the page, so that they fit light and dark themes and paper.

Series differ by colour (Okabe and Ito 2008, distinguishable by colour-blind readers), by dash and by mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from workbench import svg
from workbench.display import truncate_text
from workbench.svg import CHARACTER_WIDTH, Axis, Scale, truncate_to_width

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
COLOURS = 7  # CSS classes s0 to s6, defined by the page
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "10 4", "4 2")
MAX_POINTS = 1500  # of one line; more than a screen has columns


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[tuple[float, float], ...]
    marked: bool = False


@dataclass(frozen=True)
class ChartBar:
    """A bar from `begin` to `end`, in the colour of a series."""

    begin: float
    end: float
    colour: int


def line_chart(series: Sequence[Series], x: Axis, y: Axis, title: str) -> str:
    """Draw one line a series, over numbers or names; points that a logarithm cannot show are left out."""
    series = [Series(each.name, tuple(_drawable(each.points, x, y)), each.marked) for each in series]
    across = Scale.over([p[0] for each in series for p in each.points], LEFT, WIDTH - RIGHT, x)
    rows = _legend([each.name for each in series])
    height = HEIGHT + 16 * len(rows)
    bottom = height - BOTTOM - 16 * len(rows)
    up = Scale.over([p[1] for each in series for p in each.points], bottom, TOP, y, zero=not y.log)
    parts = [*svg.x_axis(across, x, up.end, up.begin), *svg.y_axis(up, y, across.begin, across.end, 5)]
    for number, each in enumerate(series):
        places = [(across(a), up(b)) for a, b in _thinned(each.points)]
        colour = number % COLOURS
        parts.append(svg.path(places, class_=f"s{colour}", stroke_dasharray=DASHES[colour]))
        if each.marked:
            parts += [_mark(colour, a, b) for a, b in places]
    keys = _keys(rows, height - 16 * len(rows) + 4, [each.marked for each in series])
    return _picture(height, title, [*parts, *keys])


def bar_chart(rows: Sequence[tuple[str, Sequence[ChartBar]]], x: Axis, names: Sequence[str], title: str) -> str:
    """Draw one row of bars a name; `names` label the colours."""
    line, left = 15, min(190, LEFT + int(CHARACTER_WIDTH * max((len(name) for name, _ in rows), default=0)) - 40)
    left = max(left, 60)
    legend = _legend(names)
    height = TOP + line * len(rows) + BOTTOM + 16 * len(legend)
    ends = [end for _, found in rows for bar in found for end in (bar.begin, bar.end)]
    across = Scale.over([0.0, *ends], left, WIDTH - RIGHT, x, zero=True)
    bottom = TOP + line * len(rows)
    parts = list(svg.x_axis(across, x, TOP, bottom))
    for number, (name, found) in enumerate(rows):
        top = TOP + line * number
        parts.append(svg.text(left - 6, top + 11, truncate_to_width(name, left), text_anchor="end"))
        for bar in found:
            begin, wide = across(bar.begin), max(0.8, across(bar.end) - across(bar.begin))
            parts.append(svg.rect(begin, top + 2, wide, line - 5, class_=f"f{bar.colour % COLOURS}"))
    return _picture(height, title, parts + list(_keys(legend, bottom + BOTTOM + 4)))


def _drawable(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> Iterator[tuple[float, float]]:
    for a, b in points:
        if x.shows(a) and y.shows(b):
            yield float(a), float(b)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return the lowest and the highest of neighbouring points, so that no peak is lost where points are many."""
    if len(points) <= MAX_POINTS:
        return points
    size = 2 * len(points) / MAX_POINTS
    kept: list[tuple[float, float]] = []
    for number in range(MAX_POINTS // 2):
        part = points[int(number * size) : int((number + 1) * size)]
        ends = {id(each): each for each in (min(part, key=_height), max(part, key=_height))}
        kept += sorted(ends.values())
    return kept


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _mark(colour: int, x: float, y: float) -> str:
    name = f"f{colour}"
    shapes = (
        svg.circle(x, y, 3.2, class_=name),
        svg.rect(x - 3, y - 3, 6, 6, class_=name),
        svg.polygon([(x, y - 4), (x + 4, y + 3), (x - 4, y + 3)], class_=name),
        svg.polygon([(x, y - 4), (x + 4, y), (x, y + 4), (x - 4, y)], class_=name),
    )
    return shapes[colour % len(shapes)]


def _legend(names: Sequence[str]) -> list[list[tuple[int, str]]]:
    """Return names in lines as wide as the chart; none for a single name."""
    rows: list[list[tuple[int, str]]] = []
    left = 0.0
    for number, name in enumerate(names if len(names) > 1 else ()):
        wide = 34 + CHARACTER_WIDTH * min(len(name), 60)
        if left < wide or not rows:
            rows.append([])
            left = WIDTH - 20
        rows[-1].append((number, name))
        left -= wide
    return rows


def _keys(rows: Sequence[Sequence[tuple[int, str]]], top: float, marked: Sequence[bool] = ()) -> Iterator[str]:
    """Draw the legend: lines with their marks, or blocks where `marked` is empty."""
    for line, row in enumerate(rows):
        x, y = 14.0, top + 16 * line
        for number, name in row:
            colour = number % COLOURS
            if not marked:
                yield svg.rect(x, y - 6, 18, 9, class_=f"f{colour}")
            else:
                yield svg.line(x, y - 2, x + 18, y - 2, class_=f"s{colour}", stroke_dasharray=DASHES[colour])
                yield _mark(colour, x + 9, y - 2) if marked[number] else ""
            yield svg.text(x + 23, y + 2, truncate_text(name, 60))
            x += 34 + CHARACTER_WIDTH * min(len(name), 60)


def _picture(height: float, title: str, parts: Sequence[str]) -> str:
    return svg.tag(
        "svg", svg.tag("title", escape(title)), *parts, class_="plot", viewBox=f"0 0 {WIDTH} {height:.0f}",
        width=WIDTH, height=float(height), role="img", aria_label=title,
    )  # fmt: skip
