"""Step through a record, with the control that all views of a log, a text or a history share."""

from __future__ import annotations

from pathlib import Path
from threading import RLock
from typing import Any

import anywidget
import traitlets

HERE = Path(__file__).parent


class Recorded(anywidget.AnyWidget):
    """A control that chooses a step of a record with buttons, a slider, or an animation that ends at the last step.

    `step` and the trait `name` of `view` are equal, and within `first` to `last`. Where the record grows, `follow`
    moves to each new last step; going back ends it, going to the last step begins it again. The label is "`name` 3 of
    9", or else `title`. The animation takes `interval` milliseconds a step at least, and waits until `drawn` is the
    present step.
    """

    _esm = (HERE / "recorded.js").read_text(encoding="utf-8")
    _css = (HERE / "recorded.css").read_text(encoding="utf-8")
    first = traitlets.Int(0).tag(sync=True)
    last = traitlets.Int(0).tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    drawn = traitlets.Int(0).tag(sync=True)
    name = traitlets.Unicode().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    interval = traitlets.Int(200).tag(sync=True)
    grows = traitlets.Bool(False).tag(sync=True)
    follow = traitlets.Bool(False).tag(sync=True)

    def __init__(self, view: traitlets.HasTraits, name: str = "step", **traits: Any):
        self._moving = RLock()
        super().__init__(name=name, **traits)

        def choose(change: Any) -> None:
            self.step = change["new"]
            view.set_trait(name, self.step)  # which may be another: the nearest one in the record

        view.observe(choose, name)
        self.observe(lambda change: view.set_trait(name, change["new"]), "step")

    def extend(self, first: int, last: int) -> None:
        """Set the first and last step of the record; then go to the last step with `follow`, else to the step nearest
        to the present one."""
        with self._moving:
            self.first, self.last = first, last
            step = last if self.follow else min(max(first, self.step), last)
            if step != self.step:
                self.step = step

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Apply what the user chose in the browser. ipywidgets validates it at the end, so no thread may extend the
        record until then."""
        with self._moving:
            super().set_state(sync_data)

    @traitlets.validate("step")
    def _choose(self, proposal: Any) -> int:
        """Set `follow` before the step, so that a thread that extends the record cannot move the step again."""
        with self._moving:
            step = min(max(self.first, proposal["value"]), self.last)
            self.follow = self.grows and step == self.last
            return step
