"""Step through numbers by buttons, a slider, or an animation that ends at the last."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

HERE = Path(__file__).parent


class StepControl(anywidget.AnyWidget):
    """`step` goes from 0 to `last`; the browser plays it, and waits until `drawn` says that a step is shown. `title`
    names the present step for screen readers."""

    _esm = (HERE / "step_control.js").read_text(encoding="utf-8")
    _css = (HERE / "step_control.css").read_text(encoding="utf-8")
    step = traitlets.Int(0).tag(sync=True)
    last = traitlets.Int(0).tag(sync=True)
    drawn = traitlets.Int(0).tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
