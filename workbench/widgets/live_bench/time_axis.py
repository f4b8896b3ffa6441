"""One cursor, zoom and selection for all panels of a picture that share an axis of time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

HERE = Path(__file__).parent


class TimeAxis(anywidget.AnyWidget):
    """The pointer, the wheel and the keys of the picture below it, which says where its axis is by `data-axis`.

    The browser shows cursor and selection at once and sends what was done; `on_message` takes it: `cursor` (a time, or
    None for the newest), `move` and `extend` (steps), `window`, `zoom` (a factor, with the time `at` that stays), `pan`
    (a share of the window), `select` (two times, or none), `all`.
    """

    _esm = (HERE / "time_axis.js").read_text(encoding="utf-8")
    _css = (HERE / "time_axis.css").read_text(encoding="utf-8")
    cursor = traitlets.Float(None, allow_none=True).tag(sync=True)  # seconds, as in data-axis
    selection = traitlets.List(traitlets.Float()).tag(sync=True)  # two times, or none
    reading = traitlets.Unicode().tag(sync=True)  # the values at the cursor
    heard = traitlets.Int().tag(sync=True)  # messages that were answered
    still = traitlets.Bool(False).tag(sync=True)  # whether the reader's system asks for reduced motion

    def __init__(self, on_message: Callable[[dict[str, Any]], None]):
        super().__init__()
        self._on_message = on_message
        self.on_msg(self._take)

    def _take(self, _: Any, message: Any, __: Any) -> None:
        try:
            self._on_message(message)
        finally:
            self.heard += 1
