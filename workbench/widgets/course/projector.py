"""Switch projector mode in all open notebooks: larger letters and pictures, one dimmed line of code, high contrast."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

HERE = Path(__file__).parent


class ProjectorSwitch(anywidget.AnyWidget):
    """A button that switches projector mode. `on` sets the mode at the moment when the button is shown; None leaves it
    unchanged."""

    _esm = (HERE / "projector.js").read_text(encoding="utf-8")
    rules = traitlets.Unicode().tag(sync=True)  # CSS that stays in the page when the switch's notebook is closed
    on = traitlets.Bool(None, allow_none=True).tag(sync=True)

    def __init__(self, on: bool | None = None):
        super().__init__(on=on, rules=(HERE / "projector.css").read_text(encoding="utf-8"))
