"""Share one cursor, zoom and selection among all panels of a picture with one time axis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

HERE = Path(__file__).parent


class TimeAxis(anywidget.AnyWidget):
    """An input widget for the time axis of the picture below it, by pointer, wheel and keys; the picture's `data-axis`
    gives the axis' position.

    The browser draws cursor and selection at once and sends each action to `on_message`: `cursor` (a time, or None for
    the newest), `move` and `extend` (steps), `window`, `zoom` (a factor, around the fixed time `at`), `pan` (a fraction
    of the window), `select` (two times, or none), `all`.
    """

    _esm = (HERE / "time_axis.js").read_text(encoding="utf-8")
    _css = (HERE / "time_axis.css").read_text(encoding="utf-8")
    cursor = traitlets.Float(None, allow_none=True).tag(sync=True)  # seconds, as in data-axis
    selection = traitlets.List(traitlets.Float()).tag(sync=True)  # two times, or none
    reading = traitlets.Unicode().tag(sync=True)  # the values at the cursor
    heard = traitlets.Int().tag(sync=True)  # number of messages handled
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
