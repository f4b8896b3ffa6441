"""Projector mode: larger letters and pictures, code dimmed to one line, strong contrast, in every open notebook."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

HERE = Path(__file__).parent


class ProjectorSwitch(anywidget.AnyWidget):
    """A button that switches projector mode; `on` sets it when shown, None leaves the page as it is."""

    _esm = (HERE / "projector.js").read_text(encoding="utf-8")
    rules = traitlets.Unicode().tag(sync=True)  # stays with the page when the notebook that has the switch is closed
    on = traitlets.Bool(None, allow_none=True).tag(sync=True)

    def __init__(self, on: bool | None = None):
        super().__init__(on=on, rules=(HERE / "projector.css").read_text(encoding="utf-8"))


def projector(on: bool = True) -> ProjectorSwitch:
    """Return a switch that turns projector mode on (or off) as soon as a cell shows it."""
    return ProjectorSwitch(on)
