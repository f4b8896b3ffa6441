"""Draw stacked bars of weights, cache and activations, and the tables below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from workbench import svg
from workbench.memory.report import format_bytes
from workbench.svg import CHARACTER_WIDTH, Axis, Scale

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 780, 120, 110, 26, 30, 20
MAX_LIMIT_RATIO = 8  # a memory so many times the largest bar lies beyond the picture
PARTS = ("weights", "cache", "activations")
LETTERS = tuple(name[0].upper() for name in PARTS)
HEADS = ("the runner, as loaded", "predicted", "measured", "difference")
RIGHT_ALIGNED = "style='text-align:right;white-space:nowrap'"
TABLE_SPACING = "style='border-spacing:10px 1px'"
TEXT_COLOURS = ("#ffffff", "#000000", "#000000")  # read on the first three series colours


@dataclass(frozen=True)
class MemoryBar:
    """One bar: bytes of its parts, as in `PARTS`; with a `problem` there are none."""

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
    """One line of the table: a letter that the bar has too, what it is, its bytes, and how they come about."""

    letter: str
    name: str
    bytes: float
    formula: str = ""


def scale_of(stacks: Sequence[MemoryBar], available: float | None, width: float = WIDTH) -> Scale:
    """From bytes to pixels; `available` is in it unless it is far beyond."""
    most = max([stack.total for stack in stacks] or [0]) or 1
    if available is not None and available < MAX_LIMIT_RATIO * most:
        most = max(most, available)
    return Scale(0, most, LEFT, width - RIGHT)


def draw_bars(stacks: Sequence[MemoryBar], available: float | None, title: str, width: float = WIDTH) -> str:
    across = scale_of(stacks, available, width)
    bottom = TOP + ROW * len(stacks)
    parts = [*svg.x_axis(across, Axis(""), TOP - 4, bottom, 5, lambda value: format_bytes(value) if value else "0")]
    for row, stack in enumerate(stacks):
        parts += _bar(across, stack, TOP + ROW * row, row == 0)
    if available is not None:
        parts.append(_limit(across, available, bottom))
    return svg.document(width, bottom + 24, *parts, title=title)


def draw_table(lines: Sequence[MemoryTableRow], total: float) -> str:
    rows = "".join(
        f"<tr><td>{_swatch(line.letter)}</td><td>{escape(line.name)}</td><td {RIGHT_ALIGNED}>{line.bytes:,.0f}</td>"
        f"<td {RIGHT_ALIGNED}>{format_bytes(line.bytes)}</td>"
        f"<td style='text-align:left'>{escape(line.formula)}</td></tr>"
        for line in lines
    )
    whole = (
        f"<tr><th></th><th>in all</th><th {RIGHT_ALIGNED}>{total:,.0f}</th>"
        f"<th {RIGHT_ALIGNED}>{format_bytes(total)}</th><th></th></tr>"
    )
    heads = (
        f"<tr><th></th><th>part</th><th {RIGHT_ALIGNED}>bytes</th><th></th>"
        "<th style='text-align:left'>formula</th></tr>"
    )
    return f"<table {TABLE_SPACING}>{heads}{rows}{whole}</table>"


def draw_measured(rows: Sequence[tuple[str, float, float, str]]) -> str:
    """Predicted and measured bytes side by side: (what, predicted, measured, note)."""
    caption = "".join(
        f"<tr><td>{escape(what)}</td><td {RIGHT_ALIGNED}>{predicted:,.10g}</td><td {RIGHT_ALIGNED}>{found:,.10g}</td>"
        f"<td {RIGHT_ALIGNED}>{_difference(found - predicted)}</td><td style='text-align:left'>{escape(note)}</td></tr>"
        for what, predicted, found, note in rows
    )
    heads = "".join(f"<th {RIGHT_ALIGNED if n else ''}>{name}</th>" for n, name in enumerate(HEADS))
    return f"<table {TABLE_SPACING}><tr>{heads}<th></th></tr>{caption}</table>"


def _difference(value: float) -> str:
    return "none" if value == 0 else f"{value:+,.10g}"


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
        tip = f"{stack.name}: {PARTS[place]} {size:,.0f} bytes, {size / (stack.total or 1):.1%} of {stack.total:,.0f}"
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
    """As much as can be said within the bar."""
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
