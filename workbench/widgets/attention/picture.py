"""Draw a layer's heads side by side, grouped by KV head, and one weight map with axes, labels, window and sinks.

The map is a canvas: its tiles are sent to the browser when they become visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from workbench import pixels, svg
from workbench.pixels import data_uri
from workbench.widgets.attention.data import TILE_SIDE, AttentionSource, TilePyramid

THUMBNAIL_SIDE, GAP, SIDE, MAX_SIDE, LEFT = 60, 8, 460, 640, 92
WIDTH = 640  # pixels; default
LETTER = 10  # font size of labels at cells, in pixels
MAX_NAMED_TOKENS = 64  # most tokens on an axis with names
HATCH = (
    '<defs><pattern id="wb-unseen" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="grid" d="M-1 7L7 -1"/></pattern></defs>'
)
WINDOW_DASH, SINKS_DASH, HEADS_DASH = [], [3, 3], [8, 3]  # dashes of the lines over a map
LINE_MEANINGS = (
    (WINDOW_DASH, "where the window begins"),
    (SINKS_DASH, "where the sinks end"),
    (HEADS_DASH, "the next head's rows"),
)
TICKS = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)
MAX_STEPPED_ROWS = 128  # most rows of a window's edge that is drawn in steps
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class HeadThumbnail:
    head: int
    kv_head: int
    cells: np.ndarray  # uint8, small
    chosen: bool


@dataclass(frozen=True)
class WeightMap:
    """The data of a weight map with `rows` x `columns` weights; `cells` may have a lower resolution. Names, numbers and
    `marks` are as in `HeatMap`."""

    cells: np.ndarray
    rows: int
    columns: int
    row_names: Sequence[str]
    row_numbers: Sequence[int]
    column_names: Sequence[str]
    marks: Sequence[Sequence]


def draw_heads(thumbs: Sequence[HeadThumbnail], caption: Sequence[str], width: float = WIDTH) -> tuple[str, float]:
    """Draw every head as a small map that can be picked, under a bracket for each KV head; return markup and height."""
    each, across = THUMBNAIL_SIDE + GAP, max(1, int(width - 8) // (THUMBNAIL_SIDE + GAP))
    parts = [svg.text(4, 14 + 15 * n, line, class_=None if n == 0 else "faint") for n, line in enumerate(caption)]
    top = 15 * len(caption) + 10
    for place, thumb in enumerate(thumbs):
        x, y = 4 + each * (place % across), top + (THUMBNAIL_SIDE + 34) * (place // across)
        begins = place % across == 0 or thumbs[place - 1].kv_head != thumb.kv_head
        if begins:
            alike = [t for t in thumbs[place : place - place % across + across] if t.kv_head == thumb.kv_head]
            end = x + each * len(alike) - GAP
            parts.append(svg.path([(x, y + 12), (x, y + 7), (end, y + 7), (end, y + 12)]))
            parts.append(svg.text(x + 1, y + 4, f"KV head {thumb.kv_head}", font_size=10))
        parts.append(svg.rect(x, y + 15, THUMBNAIL_SIDE, THUMBNAIL_SIDE, fill="url(#wb-unseen)"))
        parts.append(_image(x, y + 15, THUMBNAIL_SIDE, THUMBNAIL_SIDE, thumb.cells))
        parts.append(
            svg.rect(
                x, y + 15, THUMBNAIL_SIDE, THUMBNAIL_SIDE,
                key=f"head {thumb.head}", fill="transparent", stroke="currentColor",
                stroke_width=3 if thumb.chosen else 0.5, tabindex=0 if thumb.chosen else -1, role="button",
                aria_label=f"head {thumb.head}", tip=f"head {thumb.head} reads keys and values {thumb.kv_head}",
            )
        )  # fmt: skip
        weight = "bold" if thumb.chosen else None
        label = f"head {thumb.head}" + (" ◂" if thumb.chosen else "")
        parts.append(svg.text(x, y + THUMBNAIL_SIDE + 27, label, font_size=10, font_weight=weight))
    height = top + (THUMBNAIL_SIDE + 34) * -(-len(thumbs) // across) + 2
    return HATCH + "".join(parts), height


def draw_legend(y: float, marks: Sequence[Sequence] = ()) -> tuple[str, float]:
    """Draw the colour scale and an entry for each kind of line in `marks`; return markup and height."""
    x, wide = 4.0, 240.0
    bars = [svg.rect(x + wide * n / 48, y, wide / 48 + 0.5, 10, fill=svg.cividis_colour(n / 47)) for n in range(48)]
    ticks = [svg.text(x + wide * t**0.5, y + 21, f"{t:g}", font_size=LETTER, text_anchor="middle") for t in TICKS[1:]]
    zero = svg.text(x, y + 21, "0", font_size=LETTER)
    unseen = svg.rect(x + wide + 22, y, 22, 10, fill="url(#wb-unseen)", stroke="currentColor", stroke_opacity=0.5)
    said = svg.text(x + wide + 50, y + 9, "not looked at", font_size=10)
    parts, right, high = [*bars, zero, *ticks, unseen, said], 4.0, 30.0
    for dash, label in LINE_MEANINGS:
        if any(list(mark[0]) == dash for mark in marks):
            high = 48.0
            parts.append(_line([(right, y + 36), (right + 32, y + 36)], dash))
            parts.append(svg.text(right + 38, y + 40, label, font_size=10))
            right += 60 + 5.2 * len(label)
    return "".join(parts), high


def draw_map(shown: WeightMap, y: float, width: float = WIDTH) -> tuple[str, float]:
    """Draw the map with its axes; a cell is one weight, or the maximum of several. Return markup and height."""
    side = min(MAX_SIDE, width - LEFT - 12)
    cell = min(side / max(shown.columns, 1), 1.5 * SIDE / max(shown.rows, 1), 20.0)
    named = shown.columns <= MAX_NAMED_TOKENS and cell >= LETTER
    room = 78 if named else 40
    wide, high, top = cell * shown.columns, cell * shown.rows, y + room
    parts = [
        svg.rect(LEFT, top, wide, high, fill="url(#wb-unseen)", stroke="currentColor", stroke_opacity=0.4),
        _image(LEFT, top, wide, high, shown.cells),
    ]
    for dash, *points in shown.marks:
        at = [(LEFT + cell * a, top + cell * b) for a, b in points]
        parts.append(_line(at, dash))
    for n, name in _labels(shown.row_names, shown.row_numbers, cell, named):
        where = top + cell * (n + 0.5) + 3
        parts.append(svg.text(LEFT - 5, where, name[-13:], text_anchor="end", font_size=LETTER))
    for n, name in _labels(shown.column_names, range(shown.columns), cell, named):
        turned = (
            f"translate({svg.format_coordinate(LEFT + cell * (n + 0.5) + 3)},{svg.format_coordinate(top - 5)}) "
            "rotate(-90)"
        )
        parts.append(svg.tag("g", svg.text(0, 0, name[:11], font_size=LETTER), transform=turned))
    parts.append(svg.text(4, y + 12, "from ↓  to →", class_="faint", font_size=10))
    return "".join(parts), room + high + 8


def _line(points: Sequence[tuple[float, float]], dash: Sequence[float]) -> str:
    """Draw a white line with a black border, visible on dark and light cells."""
    label = " ".join(map(str, dash)) or None
    return svg.path(points, stroke_width=2.6, style="stroke:#000", stroke_dasharray=label) + svg.path(
        points, stroke_width=1.2, style="stroke:#fff", stroke_dasharray=label
    )


def _labels(names: Sequence[str], numbers: Sequence[int], cell: float, named: bool) -> list[tuple[int, str]]:
    if named:
        return list(enumerate(names))
    step = next(n for n in (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**9) if n * cell >= 28)
    return [(n, str(number)) for n, number in enumerate(numbers) if number % step == 0]


def _image(x: float, y: float, width: float, height: float, cells: np.ndarray) -> str:
    if not cells.size:
        return ""
    return svg.tag(
        "image", x=float(x), y=float(y), width=float(width), height=float(height), href=data_uri(cells),
        preserveAspectRatio="none", style="image-rendering:pixelated",
    )  # fmt: skip


@dataclass(frozen=True)
class MapLabels:
    """The labels of a weight map of a layer's `heads`, which are stacked one below the other; `names` has one name for
    each position."""

    source: AttentionSource
    layer: int
    heads: tuple[int, ...]
    names: Sequence[str]

    @property
    def title(self) -> str:
        window, sinks = self.source.window_and_sinks(self.layer)
        reach = "the whole context" if window is None else f"a window of {window}"
        reach += f" and {sinks} sinks" if sinks else ""
        first, last = self.heads[0], self.heads[-1]
        which = f"head {first}" if first == last else f"heads {first} to {last}"
        size = f"{len(self.source.positions)} queries, {self.source.columns} tokens"
        return f"layer {self.layer}, {which} of {self.source.num_heads(self.layer)}, {reach}; {size}"

    @property
    def axes(self) -> tuple[list[str], list[int], list[str]]:
        """Return the names of the rows, the positions of the rows, and the names of the columns."""
        numbers = list(self.source.positions) * len(self.heads)
        return [self.names[n] for n in numbers], numbers, list(self.names)

    @property
    def marks(self) -> list[list[Any]]:
        """Return the lines over the map, in the form of `HeatMap.marks`: bounds of window and sinks, and borders
        between stacked heads."""
        (window, sinks), positions = self.source.window_and_sinks(self.layer), self.source.positions
        count, marks = len(positions), []
        consecutive = count > 1 and positions[-1] - positions[0] == count - 1
        bounded = consecutive and window is not None and positions[-1] >= window
        for place in range(len(self.heads)):
            if bounded and window is not None:
                top = place * count - positions[0]
                first, end = max(positions[0], window), positions[-1] + 1
                marks.append([WINDOW_DASH, *_edge(first - window + 1, top + first, end - first)])
                if sinks:
                    marks.append([SINKS_DASH, [sinks, top + first], [sinks, top + end]])
            if place:
                marks.append([HEADS_DASH, [0, place * count], [self.source.columns, place * count]])
        return marks

    def describe_cell(self, row: int, column: int) -> str:
        """Return a caption for a cell: its head, query, key and weight."""
        place, at = divmod(row, len(self.source.positions))
        head, position = self.heads[place], self.source.positions[at]
        weights, seen = self.source.read(self.layer, at, at + 1)
        shown = column < weights.shape[-1] and bool((seen[head] if seen.ndim == 3 else seen)[0, column])
        value = f"weight {float(weights[head, 0, column]):.4f}" if shown else "not looked at"
        return f"head {head}: from {self._named(position)} to {self._named(column)}: {value}"

    def _named(self, position: int) -> str:
        name = self.names[position]
        return name if name == str(position) else f"{position} {name}"


def _edge(column: int, row: int, count: int) -> list[list[int]]:
    """Return the left edge of a window over `count` rows, each one column further right than the row above; as steps,
    or as a straight line for many rows."""
    if count > MAX_STEPPED_ROWS:
        return [[column, row], [column + count, row + count]]
    return [[column + n, row + n + end] for n in range(count) for end in (0, 1)]


def token_label(token: bytes) -> str:
    """Return a token's text on one line, with symbols in place of white space and unprintable characters."""
    text = token.decode("utf-8", "replace")
    return "".join({" ": "·", "\n": "⏎", "\t": "⇥"}.get(c, c if c.isprintable() else "�") for c in text)


NO_TILES = TilePyramid(0, 0, lambda begin, end: np.zeros((end - begin, 0), np.uint8))


class HeatMap(anywidget.AnyWidget):
    """A widget that shows a heat map of `tiles`, moved and zoomed with mouse and keyboard.

    `marks` are lines over it, each [dash, [x, y], [x, y], ...] in cells. `row_names` and `column_names` are drawn if
    they fit, else some of `row_numbers` and column numbers. `pointed` is the cell under the pointer or the keyboard's
    cursor, [row, column] or empty; `tell` returns its caption.
    """

    _esm = (FOLDER / "heat_map.js").read_text(encoding="utf-8")
    _css = (FOLDER / "heat_map.css").read_text(encoding="utf-8")
    rows = traitlets.Int(0).tag(sync=True)
    columns = traitlets.Int(0).tag(sync=True)
    side = traitlets.Int(TILE_SIDE).tag(sync=True)
    top = traitlets.Int(0).tag(sync=True)
    stamp = traitlets.Int(0).tag(sync=True)  # version of the tiles; a tile with another stamp is outdated
    frame = traitlets.Int(0).tag(sync=True)  # changes with a new map, which is then shown whole
    colours = traitlets.Bytes(b"").tag(sync=True)
    row_names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    row_numbers = traitlets.List(traitlets.Int()).tag(sync=True)
    column_names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    row_title = traitlets.Unicode("").tag(sync=True)
    column_title = traitlets.Unicode("").tag(sync=True)
    marks = traitlets.List().tag(sync=True)
    pointed = traitlets.List(traitlets.Int()).tag(sync=True)
    caption = traitlets.Unicode("").tag(sync=True)
    label = traitlets.Unicode("heat map").tag(sync=True)

    def __init__(self, tell: Callable[[int, int], str] = "row {}, column {}".format, **traits: Any):
        super().__init__(colours=pixels.palette(), **traits)
        self.tiles = NO_TILES
        self.describe = tell
        self.on_msg(self._on_message)
        self.observe(self._update_caption, ["pointed"])
        self.add_class("wb-heatmap")

    def show_tiles(self, tiles: TilePyramid, reset_view: bool = True, **traits: Any) -> None:
        """Show `tiles` and set other traits in the same update. Without `reset_view`, zoom and position stay, as for a
        map that has grown."""
        self.tiles = tiles
        with self.hold_sync():
            self.set_trait("rows", tiles.rows)
            self.set_trait("columns", tiles.columns)
            self.top, self.stamp = tiles.max_level, self.stamp + 1
            for name, value in traits.items():
                self.set_trait(name, value)
            if reset_view:
                self.frame += 1
        self._update_caption()

    def _on_message(self, _: Any, content: dict[str, Any], __: Any) -> None:
        for level, row, column in content.get("want", ()):
            cells = np.ascontiguousarray(self.tiles.tile(level, row, column))
            header = {"tile": [level, row, column], "size": list(cells.shape), "stamp": content.get("stamp")}
            self.send(header, [cells.tobytes()])

    def _update_caption(self, _: object = None) -> None:
        cell: list[int] | None = None
        while cell != self.pointed:  # the pointer may move while a redraw's thread describes this cell
            cell = self.pointed
            inside = len(cell) == 2 and cell[0] < self.rows and cell[1] < self.columns
            self.caption = self.describe(*cell) if inside else ""
