"""Close the views that a cell has shown when it has run again, unless it or another cell shows them still."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any, Protocol

LOG = logging.getLogger(__name__)


class CellView(Protocol):
    """A view that a cell may show."""

    def close(self) -> None: ...


@dataclass
class CellRun:
    """The last run of a cell with the views that it has shown, and `earlier` ones that are closed at its end."""

    run: str
    views: list[CellView] = field(default_factory=list)
    earlier: list[CellView] = field(default_factory=list)

    def begin(self, run: str) -> None:
        """Take the views of another run for earlier ones."""
        if run != self.run:
            self.run, self.views, self.earlier = run, [], [*self.earlier, *self.views]


_RUNS: dict[str, CellRun] = {}  # by cell
_WATCHED: set[int] = set()  # shells whose cells are watched


def note_shown(view: CellView) -> None:
    """Note that the cell that runs shows a view, by itself or within a box."""
    shell = running_shell()
    cell, run = _running_cell(shell)
    if cell is None or run is None:
        return
    found = _RUNS.setdefault(cell, CellRun(run))
    found.begin(run)
    found.views.append(view)
    if id(shell) not in _WATCHED:
        _WATCHED.add(id(shell))
        shell.events.register("post_run_cell", lambda *_: close_earlier())


def note_closed(view: CellView) -> None:
    """Forget a view that is closed: no cell holds it any more."""
    for run in tuple(_RUNS.values()):
        run.views = [each for each in run.views if each is not view]
        run.earlier = [each for each in run.earlier if each is not view]


def close_earlier() -> None:
    """At the end of a cell's run: close what an earlier run of it has shown and no cell shows now.

    An error of one view is logged, and the others are closed all the same.
    """
    cell, run = _running_cell(running_shell())
    if cell not in _RUNS or run is None:
        return
    found = _RUNS[cell]
    found.begin(run)
    earlier, found.earlier = found.earlier, []
    shown = [view for each in _RUNS.values() for view in (*each.views, *each.earlier)]
    for view in earlier:
        if not any(view is each for each in shown):
            try:
                view.close()
            except Exception:
                LOG.exception("an earlier view of this cell could not be closed: %r", view)


def running_shell() -> Any:
    """Return IPython's shell; None outside of one."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _running_cell(shell: Any) -> tuple[str | None, str | None]:
    """Return the notebook's id of the cell that runs, and the id of its run."""
    parent: Any = getattr(shell, "parent_header", None) or {}
    return parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")
