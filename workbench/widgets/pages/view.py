"""Show the cache's pages by owner, step by step, also while a runner works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.widgets.pages.cells import letters
from workbench.widgets.pages.data import PageSnapshot, SnapshotLog, panels_of_runner, snapshot_listener, take_snapshot
from workbench.widgets.pages.picture import LAYOUTS, draw_page_map
from workbench.widgets.recorded import Recorded
from workbench.widgets.view import PictureWidget


class PageMap(PictureWidget):
    """A view of the cache's pages by owner over steps: shared prefixes, pages of the prefix index, free pages, and CPU
    pages; residual and quantized pages have separate panels.

    `source` is a runner, or the snapshots of another map. A runner's steps are recorded from now on until the view is
    closed, and shown while `steps.follow` is on. `step` is the shown step, `arranged` the layout, and `chosen` the
    owner with highlighted pages (click on a page or a name).
    """

    step = traitlets.Int(0)
    arranged = traitlets.Enum(LAYOUTS, LAYOUTS[0])
    chosen = traitlets.Unicode("")

    def __init__(self, source: Any):
        super().__init__()
        self._log, listen = _open_log(source)
        grows = listen is not None
        self.steps = Recorded(self, grows=grows, follow=grows)
        if listen is not None:  # after the steps and the log: an event causes a redraw, which needs both
            self._leave = listen(self.throttle.mark)
        arranged = ipywidgets.Dropdown(description="pages", options=LAYOUTS)
        self.watch("step", "arranged", "chosen")
        self.steps.observe(lambda _: self.throttle.mark(), "follow")
        self.shown.on_pick(self._pick)
        self.steps.extend(self.snapshots[0].step, self.snapshots[-1].step)
        self.step = self.steps.last
        self.show(ipywidgets.HBox([self.steps, self.linked("arranged", arranged)]))

    @property
    def snapshots(self) -> tuple[PageSnapshot, ...]:
        """Return the recorded snapshots, oldest first."""
        return self._log.snapshots

    def fullest(self, panel: int = 0) -> int:
        """Return the first step with the fewest free pages in a panel, given by its index."""
        return min(self.snapshots, key=lambda seen: seen.num_free(panel)).step

    def most_shared(self, panel: int = 0) -> int:
        """Return the first step with the most shared pages in a panel, given by its index."""
        return max(self.snapshots, key=lambda seen: seen.num_shared(panel)).step

    def redraw(self) -> None:
        self.steps.extend(self.snapshots[0].step, self.snapshots[-1].step)
        super().redraw()

    def picture(self) -> str:
        history, thinned = self.snapshots, self._log.num_thinned
        note = f"{len(history) - history[-1].between_steps} steps recorded"
        note += f", {thinned} older ones dropped" if thinned else ""
        return draw_page_map(
            self._log.at(self.step), history, self._log.owner_numbers, self.arranged, self.chosen, note, self.width
        )

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


def _open_log(source: Any) -> tuple[SnapshotLog, Callable[[Callable[[], None]], Callable[[], None]] | None]:
    """Return the log of `source`, and for a runner a function that records its steps from now on: it takes what is
    called after each one, and returns a function that stops recording."""
    from workbench.engine.runner import Runner
    from workbench.engine.runner_thread import RunnerThread

    if isinstance(source, Runner):
        live, panels = RunnerThread.attach(source), panels_of_runner(source)
        log = SnapshotLog([live.call(lambda runner: take_snapshot(runner.scheduler, panels))])
        return log, lambda on_change: live.listen(snapshot_listener(log, source.scheduler, panels, on_change))
    given = list(source) if isinstance(source, list | tuple) else []
    if not given or not all(isinstance(each, PageSnapshot) for each in given):
        raise WorkbenchError(
            f"PageMap: give a runner, or the snapshots of another PageMap, not {type(source).__name__}; "
            "a record does not hold the owners of pages"
        )
    if any(each.panels != given[0].panels for each in given):
        raise WorkbenchError("PageMap: these snapshots are of different caches; give those of one runner")
    steps = [each.step for each in given]
    if steps != sorted(set(steps)):
        raise WorkbenchError("PageMap: snapshots come in the order of their steps, each step once")
    return SnapshotLog(given, max_snapshots=len(given)), None
