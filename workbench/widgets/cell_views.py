"""Close the views of a cell's earlier runs when the cell has run again, unless a cell still shows them."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any, Protocol

LOG = logging.getLogger(__name__)


class CellView(Protocol):
    """A view that a cell may show, and that can be closed."""

    def close(self) -> None: ...


@dataclass
class CellRun:
    """The last run of a cell: the views that it shows, and `earlier` views, which are closed at its end."""

    run: str
    views: list[CellView] = field(default_factory=list)
    earlier: list[CellView] = field(default_factory=list)

    def begin(self, run: str) -> None:
        """Begin the run with the id `run`: the views of the cell's previous run become earlier ones."""
        if run != self.run:
            self.run, self.views, self.earlier = run, [], [*self.earlier, *self.views]


_RUNS: dict[str, CellRun] = {}  # by cell
_WATCHED: set[int] = set()  # ids of shells with our listener at the end of each cell


def note_shown(view: CellView) -> None:
    """Record that the running cell shows a view, by itself or within a box."""
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
    """Remove a closed view from all runs."""
    for run in tuple(_RUNS.values()):
        run.views = [each for each in run.views if each is not view]
        run.earlier = [each for each in run.earlier if each is not view]


def close_earlier() -> None:
    """Close the views of a cell's earlier runs that no cell shows now; called at the end of the cell's run.

    If closing a view fails, the error is logged and the other views are still closed.
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
    """Return IPython's shell, or None outside IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _running_cell(shell: Any) -> tuple[str | None, str | None]:
    """Return the id of the running cell in its notebook, and the id of this run; None where unknown."""
    parent: Any = getattr(shell, "parent_header", None) or {}
    return parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")
