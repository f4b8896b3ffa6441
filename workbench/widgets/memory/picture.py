"""Draw stacked bars of weights, cache and activations, and the tables below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from workbench import svg
from workbench.svg import CHARACTER_WIDTH, Scale
from workbench.units import BYTES, format_bytes, format_percent, largest_unit
from workbench.widgets.table import draw_table

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 780, 120, 110, 26, 30, 20
MAX_LIMIT_RATIO = 8  # a memory larger than this multiple of the largest bar is not on the axis
PARTS = ("weights", "cache", "activations")
LETTERS = tuple(name[0].upper() for name in PARTS)
TEXT_COLOURS = ("#ffffff", "#000000", "#000000")  # text colours on the first three series colours


@dataclass(frozen=True)
class MemoryBar:
    """One bar of the picture: the bytes of its parts, in the order of `PARTS`, or the `problem` that makes it
    impossible."""

    name: str
    bytes: tuple[float, ...] = ()
    chosen: bool = False
    key: str | None = None
    problem: str = ""

    @property
    def total(self) -> float:
        return sum(self.bytes)


@dataclass(frozen=True)
class MemoryTableRow:
    """One row of the table: the letter of the bar's part, its name, its bytes, and the formula of the bytes."""

    letter: str
    name: str
    bytes: float
    formula: str = ""


def scale_of(stacks: Sequence[MemoryBar], available: float | None, width: float = WIDTH) -> Scale:
    """Return the scale from bytes to pixels; it includes `available` bytes unless they are far beyond the bars."""
    most = max([stack.total for stack in stacks] or [0]) or 1
    if available is not None and available < MAX_LIMIT_RATIO * most:
        most = max(most, available)
    return Scale(0, most, LEFT, width - RIGHT)


def draw_bars(stacks: Sequence[MemoryBar], available: float | None, title: str, width: float = WIDTH) -> str:
    across = scale_of(stacks, available, width)
    bottom = TOP + ROW * len(stacks)
    unit, size = largest_unit(across.high, BYTES)
    axis = replace(across, high=across.high / size)  # in units, so that ticks are round numbers
    parts = []
    for value in axis.ticks(5):
        words = f"{value:g} {unit}" if value else "0"
        parts.append(svg.line(axis(value), TOP - 4, axis(value), bottom, class_="grid"))
        parts.append(svg.text(axis(value), bottom + 15, words, text_anchor="middle", class_="faint"))
    for row, stack in enumerate(stacks):
        parts += _bar(across, stack, TOP + ROW * row, row == 0)
    if available is not None:
        parts.append(_limit(across, available, bottom))
    return svg.document(width, bottom + 24, *parts, title=title)


def draw_parts(lines: Sequence[MemoryTableRow], total: float) -> str:
    """Draw a table of the parts of a bar, with their formulas."""
    rows = [(Markup(_swatch(e.letter)), e.name, f"{e.bytes:,.0f}", format_bytes(e.bytes), e.formula) for e in lines]
    whole = ("", "in all", f"{total:,.0f}", format_bytes(total), "")
    return draw_table(("", "part", "bytes", " ", "formula"), [*rows, whole], ("part", "formula"))


def draw_measured(rows: Sequence[tuple[str, float, float, str]]) -> str:
    """Draw a table of predicted and measured bytes from rows (name, predicted, measured, note)."""
    cells = [
        (
            name,
            f"{predicted:,.10g}",
            f"{found:,.10g}",
            f"{found - predicted:+,.10g}" if found != predicted else "none",
            note,
        )
        for name, predicted, found, note in rows
    ]
    return draw_table(("the runner, as loaded", "predicted", "measured", "difference", ""), cells, ("",))


def _swatch(letter: str) -> str:
    if letter not in LETTERS:
        return ""
    place = LETTERS.index(letter)
    box = svg.rect(0, 0, 16, 16, class_=f"c{place}")
    ink = svg.text(8, 12, letter, text_anchor="middle", style=f"fill:{TEXT_COLOURS[place]};font-size:11px")
    return svg.tag("svg", box, ink, width=16, height=16, aria_hidden="true")


def _bar(across: Scale, stack: MemoryBar, top: float, first: bool) -> list[str]:
    weight = "bold" if stack.chosen else None
    caption = f"▸ {stack.name}" if stack.chosen else stack.name
    parts = [svg.text(LEFT - 8, top + 15, caption, text_anchor="end", font_weight=weight)]
    if stack.problem:
        return [svg.group(*parts, svg.text(LEFT + 4, top + 15, f"not possible: {stack.problem}", class_="faint"))]
    begin = 0.0
    for place, size in enumerate(stack.bytes):
        left, right = across(begin), across(begin + size)
        share = format_percent(size / (stack.total or 1))
        tip = f"{stack.name}: {PARTS[place]} {size:,.0f} bytes, {share} of {stack.total:,.0f}"
        edge = {"stroke": "currentColor", "stroke_width": 1.5} if stack.chosen else {}
        parts.append(svg.rect(left, top, right - left, BAR, class_=f"c{place}", tip=tip, **edge))
        if inside := _fit_text(place, size, right - left):
            middle = (left + right) / 2
            parts.append(svg.text(middle, top + 14, inside, text_anchor="middle", style=f"fill:{TEXT_COLOURS[place]}"))
        begin += size
    parts.append(svg.text(across(begin) + 6, top + 15, format_bytes(stack.total), font_weight=weight))
    picked = {} if stack.key is None else {"key": stack.key, "tabindex": 0 if first else -1}
    return [svg.group(*parts, **picked)]


def _fit_text(place: int, size: float, room: float) -> str:
    """Return the longest caption that fits into `room` pixels, or ""."""
    tries = (f"{PARTS[place]} {format_bytes(size)}", format_bytes(size), LETTERS[place])
    return next((caption for caption in tries if CHARACTER_WIDTH * len(caption) + 6 <= room), "")


def _limit(across: Scale, available: float, bottom: float) -> str:
    caption = format_bytes(available)
    if available > across.high:
        far = f"memory: {caption}, {available / across.high:,.0f} times as far →"
        return svg.text(across.end + RIGHT - 4, 14, far, text_anchor="end")
    at, tip = across(available), f"memory: {available:,.0f} bytes"
    dash = svg.line(at, TOP - 6, at, bottom, stroke_dasharray="6 3", stroke_width=2, tip=tip)
    return dash + svg.text(at, 14, f"memory: {caption}", text_anchor="end" if at > across.end / 2 else "start")
