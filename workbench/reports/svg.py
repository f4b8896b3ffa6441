"""Small SVG charts whose colours come from the page, so that they fit light and dark themes and paper.

Series differ by colour (Okabe and Ito 2008, distinguishable by colour-blind readers), by dash and by mark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from workbench.display import truncate_text

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
COLOURS = 7  # CSS classes s0 to s6, defined by the page
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "10 4", "4 2")
MIN_DRAWABLE, MAX_DRAWABLE = 1e-30, 1e30  # larger and smaller values are not drawn
CHARACTER_WIDTH = 6.2  # pixels of a character at font size 11
MAX_POINTS = 1500  # of one line; more than a screen has columns


@dataclass(frozen=True)
class Axis:
    """A chart's axis. With `names` its places 0, 1, ... are categories instead of numbers."""

    title: str
    log: bool = False
    names: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class Scale:
    """A mapping from values to pixels, linear or logarithmic."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float, axis: Axis, zero: bool = False) -> Scale:
        if axis.names:
            return cls(-0.5, len(axis.names) - 0.5, begin, end)
        known = [value for value in values if _shown(value, axis)]
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        if axis.log:
            if not known:
                low, high = 1.0, 10.0
            return cls(low / 1.1, high * 1.1, begin, end, True)
        low = min(0.0, low) if zero else low
        spread = high - low
        if spread <= 1e-9 * max(abs(low), abs(high), MIN_DRAWABLE):  # equal, as far as a chart shows
            spread = max(abs(high), 1.0)
        return cls(low if zero and low == 0 else low - 0.04 * spread, high + 0.04 * spread, begin, end)

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, max_ticks: int = 6) -> list[float]:
        """Return round values: 1, 2 or 5 times a power of ten."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [step * 10.0**power for power in powers for step in steps]
                found = [value for value in found if self.low <= value <= self.high]
                if 2 <= len(found) <= max_ticks + 2 or steps == (1,):
                    return found
        rough = (self.high - self.low) / max_ticks
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
        first = math.ceil(self.low / step)
        return [round(n * step, 12) for n in range(first, math.floor(self.high / step) + 1)]


def line_chart(series: Sequence[Series], x: Axis, y: Axis, title: str) -> str:
    """Draw one line a series, over numbers or names; points that a logarithm cannot show are left out."""
    series = [Series(each.name, tuple(_drawable(each.points, x, y)), each.marked) for each in series]
    across = Scale.over([p[0] for each in series for p in each.points], LEFT, WIDTH - RIGHT, x)
    rows = _legend([each.name for each in series])
    height = HEIGHT + 16 * len(rows)
    bottom = height - BOTTOM - 16 * len(rows)
    up = Scale.over([p[1] for each in series for p in each.points], bottom, TOP, y, zero=not y.log)
    parts = [*_grid(across, up, x, y)]
    for number, each in enumerate(series):
        places = [(across(a), up(b)) for a, b in _thinned(each.points)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        colour = number % COLOURS
        parts.append(f'<polyline class="s{colour}" stroke-dasharray="{DASHES[colour]}" points="{path}"/>')
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
    parts = list(_vertical(across, x, TOP, bottom))
    for number, (name, found) in enumerate(rows):
        top = TOP + line * number
        parts.append(f'<text class="t" x="{left - 6}" y="{top + 11}" text-anchor="end">{_short(name, left)}</text>')
        for bar in found:
            begin, wide = across(bar.begin), max(0.8, across(bar.end) - across(bar.begin))
            fill = f"f{bar.colour % COLOURS}"
            parts.append(f'<rect class="{fill}" x="{begin:.1f}" y="{top + 2}" width="{wide:.1f}" height="{line - 5}"/>')
    return _picture(height, title, parts + list(_keys(legend, bottom + BOTTOM + 4)))


def _drawable(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> Iterator[tuple[float, float]]:
    for a, b in points:
        if _shown(a, x) and _shown(b, y):
            yield float(a), float(b)


def _shown(value: float, axis: Axis) -> bool:
    size = abs(value)  # False for NaN too
    return size <= MAX_DRAWABLE and (not axis.log or value >= MIN_DRAWABLE)


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


def _grid(across: Scale, up: Scale, x: Axis, y: Axis) -> Iterator[str]:
    yield from _vertical(across, x, up.end, up.begin)
    for value in up.ticks(5):
        at = up(value)
        yield f'<line class="g" x1="{across.begin}" x2="{across.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="t" x="{across.begin - 6}" y="{at + 4:.1f}" text-anchor="end">{format_tick(value)}</text>'
    middle = (up.begin + up.end) / 2
    turned = f"translate(13,{middle:.0f}) rotate(-90)"
    yield f'<text class="t" transform="{turned}" text-anchor="middle">{escape(y.title)}</text>'


def _vertical(across: Scale, x: Axis, top: float, bottom: float) -> Iterator[str]:
    ticks = [(float(i), _short(name, 90)) for i, name in enumerate(x.names)] or [
        (v, format_tick(v)) for v in across.ticks()
    ]
    for value, name in ticks:
        at = across(value)
        yield f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>'
        yield f'<text class="t" x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{name}</text>'
    middle = (across.begin + across.end) / 2
    yield f'<text class="t" x="{middle:.0f}" y="{bottom + 32}" text-anchor="middle">{escape(x.title)}</text>'


def _mark(colour: int, x: float, y: float) -> str:
    shapes = (
        f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>',
        f'<rect class="f{colour}" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>',
        f'<path class="f{colour}" d="M{x:.1f},{y - 4:.1f}l4,7h-8Z"/>',
        f'<path class="f{colour}" d="M{x:.1f},{y - 4:.1f}l4,4l-4,4l-4,-4Z"/>',
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
                yield f'<rect class="f{colour}" x="{x}" y="{y - 6}" width="18" height="9"/>'
            else:
                at = f'x1="{x}" x2="{x + 18}" y1="{y - 2}" y2="{y - 2}"'
                yield f'<line class="s{colour}" stroke-dasharray="{DASHES[colour]}" {at}/>'
                yield _mark(colour, x + 9, y - 2) if marked[number] else ""
            yield f'<text class="t" x="{x + 23}" y="{y + 2}">{_short(name, 60 * CHARACTER_WIDTH)}</text>'
            x += 34 + CHARACTER_WIDTH * min(len(name), 60)


def _picture(height: float, title: str, parts: Sequence[str]) -> str:
    name = escape(title, quote=True)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img" '
        f'aria-label="{name}"><title>{name}</title>{"".join(parts)}</svg>'
    )


def _short(name: str, pixels: float) -> str:
    return escape(truncate_to_width(name, pixels))


def truncate_to_width(name: str, pixels: float) -> str:
    """Truncate `name` to the room at font size 11, to three letters at least."""
    return truncate_text(name, max(3, int(pixels / CHARACTER_WIDTH)))


def format_tick(value: float) -> str:
    """Format a tick: at most four digits, and a suffix for thousands and above."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            size = 1e3 if letter == "k" else size
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
