"""The interface of sweep executors, and the command of a worker.

An executor knows folders and processes, nothing of experiments. A worker is `python -m workbench.sweep.worker
FOLDER/point.json`, which leaves its run folder and `outcome.json` in the point's folder; its output goes to the point's
`log.txt`. Two workers on one point do no harm: the second waits and finds it done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from workbench.sweep.point import POINT


class SweepExecutor(Protocol):
    """An executor of a sweep's points."""

    def run(self, points: Sequence[Path], on_end: Callable[[Path], None]) -> None:
        """Run a worker for each of `points` (folders of points), starting them in this order.

        `on_end` is called with each folder whose worker has ended, from the calling thread. Its outcome is then there,
        or is missing where the worker died. Retrying is the caller's decision. Points without a call may still run
        elsewhere when this returns. Where an exception leaves (Ctrl-C), workers on this machine have ended.
        """
        ...


def worker_command(point: Path) -> list[str]:
    """Return the command that runs the point in this folder, in a fresh process."""
    return [sys.executable, "-m", "workbench.sweep.worker", str(point / POINT)]
