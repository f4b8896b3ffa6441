"""Show which experts of a mixture a run used, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ipywidgets
import numpy as np
import traitlets

from workbench.trace.events import Event
from workbench.widgets.experts.data import ExpertTable
from workbench.widgets.experts.picture import draw_experts
from workbench.widgets.view import PictureWidget

ALL_STEPS = -1


class ExpertMap(PictureWidget):
    """`ExpertMap(events)` shows how many rows each expert of each layer computed, of the events of a run with
    `runner.record_experts()` on, or of a recorder that has heard it:

        runner.record_experts()
        ExpertMap(runner.stream("def fib(n):", max_tokens=32))

    `step` is one step's number, or -1 for all of them together. `rows` [layer, expert] are what is drawn.
    WorkbenchError for events that do not say it, or a step that there is not.
    """

    step = traitlets.Int(ALL_STEPS)

    def __init__(self, source: Any, step: int = ALL_STEPS):
        events: Iterable[Event] = getattr(source, "events", source)
        self.table = ExpertTable.from_events(events)
        self._rows(step)
        super().__init__(step=step)
        words = [("all steps", ALL_STEPS), *((f"step {number}", number) for number in self.table.steps)]
        dropdown = ipywidgets.Dropdown(options=words, description="shown")
        traitlets.link((self, "step"), (dropdown, "value"))
        self.watch("step")
        self.show(dropdown)

    @property
    def rows(self) -> np.ndarray:
        return self._rows(self.step)

    def _rows(self, step: int) -> np.ndarray:
        return self.table.rows(None if step == ALL_STEPS else step)

    def picture(self) -> str:
        steps = len(self.table.steps)
        caption = f"all {steps} steps" if self.step == ALL_STEPS else f"step {self.step}"
        return draw_experts(self.table.layers, self.rows, f"rows computed by each expert, {caption}", self.width)
