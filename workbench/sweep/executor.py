"""Define the interface of sweep executors, and the command of a worker.

An executor handles folders and processes and does not know experiments. A worker is `python -m workbench.sweep.worker
FOLDER/point.json`, which writes its run folder and `outcome.json` into the point's folder; its output goes to the
point's `log.txt`. Two workers on one point do no harm: the second waits and finds the point done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from workbench.sweep.point import POINT


class SweepExecutor(Protocol):
    """The interface of an executor, which runs the points of a sweep."""

    def run(self, points: Sequence[Path], on_end: Callable[[Path], None]) -> None:
        """Run a worker for each of `points` (folders of points), starting them in this order.

        `on_end` is called, in the calling thread, with the folder of each worker that has ended. The folder then has
        an outcome, unless the worker died; the caller decides on retries. Points without a call may still run
        elsewhere when this returns. If it raises (Ctrl-C), workers on this machine have ended.
        """
        ...


def worker_command(point: Path) -> list[str]:
    """Return the command that runs the point in this folder, in a fresh process."""
    return [sys.executable, "-m", "workbench.sweep.worker", str(point / POINT)]
