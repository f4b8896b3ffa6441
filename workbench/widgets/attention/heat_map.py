"""Show a heat map of any size on a canvas; tiles of bytes are sent when they come into sight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from workbench import pixels
from workbench.widgets.attention.tiles import TILE_SIDE, TilePyramid

FOLDER = Path(__file__).parent


class HeatMap(anywidget.AnyWidget):
    """Heat map of `tiles`, moved and zoomed with mouse and keyboard.

    `marks` are lines over it, each [dash, [x, y], [x, y], ...] in cells; `row_names` and `column_names` are drawn where
    there is room, else some of `row_numbers` and column numbers. `pointed` is the cell under the pointer or the
    keyboard's cursor, [row, column] or empty; `describe` returns the caption for it.
    """

    _esm = FOLDER / "heat_map.js"
    _css = FOLDER / "heat_map.css"
    rows = traitlets.Int(0).tag(sync=True)
    columns = traitlets.Int(0).tag(sync=True)
    side = traitlets.Int(TILE_SIDE).tag(sync=True)
    top = traitlets.Int(0).tag(sync=True)
    stamp = traitlets.Int(0).tag(sync=True)  # tiles of another are old
    frame = traitlets.Int(0).tag(sync=True)  # of another map altogether: it is shown whole again
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
        self.tiles = TilePyramid(0, 0, lambda begin, end: np.zeros((end - begin, 0), np.uint8))
        self.describe = tell
        self.on_msg(self._on_message)
        self.observe(self._update_caption, ["pointed"])
        self.add_class("wb-heatmap")

    def show_tiles(self, tiles: TilePyramid, reset_view: bool = True, **traits: Any) -> None:
        """Show `tiles`, at once with other traits. Not `fresh`: the map that was shown, which has grown or changed."""
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
        inside = len(self.pointed) == 2 and self.pointed[0] < self.rows and self.pointed[1] < self.columns
        self.caption = self.describe(*self.pointed) if inside else ""
