"""Show the cache's pages by owner, step by step, also while they change hands."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.widgets.pages.cells import letters
from workbench.widgets.pages.data import PageSnapshot, SnapshotLog, panels_of_runner, snapshot_listener, take_snapshot
from workbench.widgets.pages.picture import LAYOUTS, draw_page_map
from workbench.widgets.view import PictureWidget


class PageMap(PictureWidget):
    """Pages by owner over steps: shared prefixes, what the prefix index keeps, what is free, residual and quantized
    pages each in a panel of their own, and what lies on the host.

    Given a runner, every step that it computes from now on is noted and, as long as `follow` is on, shown; given
    snapshots (those of another map), these. `step` says which one is shown, `arranged` how, and `chosen` whose pages
    stand out (a click on a page or a name). Close it to have no more noted.
    """

    step = traitlets.Int(0)
    follow = traitlets.Bool(True)
    arranged = traitlets.Enum(LAYOUTS, LAYOUTS[0])
    chosen = traitlets.Unicode("")

    def __init__(self, source: Any):
        super().__init__()
        self._log, self._leave = _open_log(source, self.throttle.mark)
        self.follow = self._leave is not None
        self._moving, self._in_set_range = RLock(), False
        self._slider = ipywidgets.IntSlider(description="step", layout=ipywidgets.Layout(width="32em"))
        self._play = ipywidgets.Play(interval=200, show_repeat=False)
        live = ipywidgets.Checkbox(description="follow", indent=False, disabled=self._leave is None)
        live.layout.width = "6em"
        arranged = ipywidgets.Dropdown(description="pages", options=LAYOUTS)
        for control in (self._slider, self._play):  # not `link`, which raises where two threads move the step at once
            self.observe(lambda change, control=control: control.set_trait("value", change["new"]), "step")
            control.observe(lambda change: self.set_trait("step", change["new"]), "value")
        traitlets.link((self, "follow"), (live, "value"))
        traitlets.link((self, "arranged"), (arranged, "value"))
        self.watch("follow", "arranged", "chosen")
        self.observe(lambda _: self.throttle.mark(), "step")
        self.shown.observe(lambda change: self._pick(change["new"]), "picked")
        self._set_slider_range()
        self.step = self.snapshots[-1].step
        self.show(ipywidgets.HBox([self._play, self._slider, live, arranged]))

    @property
    def snapshots(self) -> tuple[PageSnapshot, ...]:
        """Return the recorded snapshots, oldest first."""
        return self._log.snapshots

    def fullest(self, panel: int = 0) -> int:
        """The first step after which the fewest pages of a panel (its place, from above) were free."""
        return min(self.snapshots, key=lambda seen: seen.num_free(panel)).step

    def most_shared(self, panel: int = 0) -> int:
        """The first step after which the most pages of a panel were held by several sequences."""
        return max(self.snapshots, key=lambda seen: seen.num_shared(panel)).step

    def redraw(self) -> None:
        self._set_slider_range()
        super().redraw()

    def picture(self) -> str:
        history, thinned = self.snapshots, self._log.num_thinned
        note = f"{len(history)} steps noted" + (f", {thinned} older ones let go between them" if thinned else "")
        return draw_page_map(
            self._log.at(self.step), history, self._log.owner_numbers, self.arranged, self.chosen, note, self.width
        )

    def _set_slider_range(self) -> None:
        """The controls go as far as there are snapshots; shown is the last one as long as `follow` is on."""
        with self._moving:
            first, last = self.snapshots[0].step, self.snapshots[-1].step
            self._in_set_range = True
            try:
                for control in (self._slider, self._play):
                    control.max = max(last, control.min)
                    control.min, control.max = first, last
                if self.follow:
                    self.step = last
            finally:
                self._in_set_range = False

    @traitlets.validate("step")
    def _before_step(self, proposal: dict[str, Any]) -> int:
        """Stop following before the step is set, so that the thread that draws cannot move it away again."""
        with self._moving:
            if not self._in_set_range:
                self.follow = self.follow and proposal["value"] >= self.snapshots[-1].step
        return proposal["value"]

    def _pick(self, key: str) -> None:
        if key.startswith("@"):
            name = key[1:]
        elif key.startswith("band:"):
            found = key.rsplit(":", 1)[1]
            name = next((name for name, number in self._log.owner_numbers.items() if letters(number) == found), "")
        else:
            panel, page = map(int, key.split("."))
            seen = self._log.at(self.step)
            number = int(seen.census[panel].first_owner[page])
            name = seen.owners[number].name if number >= 0 else ""
        self.chosen = "" if name == self.chosen else name


def _open_log(source: Any, on_change: Callable[[], None]) -> tuple[SnapshotLog, Callable[[], None] | None]:
    """Return the log of `source`, and for a runner a function that stops recording."""
    from workbench.engine.runner import Runner
    from workbench.engine.runner_thread import RunnerThread

    if isinstance(source, Runner):
        live, panels = RunnerThread.attach(source), panels_of_runner(source)
        log = SnapshotLog([live.call(lambda runner: take_snapshot(runner.scheduler, panels))])
        return log, live.listen(snapshot_listener(log, source.scheduler, panels, on_change))
    given = list(source) if isinstance(source, list | tuple) else []
    if not given or not all(isinstance(each, PageSnapshot) for each in given):
        raise WorkbenchError(
            f"PageMap: give a runner, or the snapshots of another PageMap, not {type(source).__name__}; "
            "a record does not say which page was whose"
        )
    if any(each.panels != given[0].panels for each in given):
        raise WorkbenchError("PageMap: these snapshots are of different caches; give those of one runner")
    steps = [each.step for each in given]
    if steps != sorted(set(steps)):
        raise WorkbenchError("PageMap: snapshots come in the order of their steps, each step once")
    return SnapshotLog(given, max_snapshots=len(given)), None
