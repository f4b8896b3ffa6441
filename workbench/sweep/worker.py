"""Run one point as a worker, `python -m workbench.sweep.worker points/KEY/point.json`, and write its outcome.

The worker writes the run folder and then, atomically, `outcome.json`: a point without it has not run. A second worker
of the same point waits for the first, and finds the point done.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.runs.record import Record
    from workbench.sweep.point import PointResult, SweepPoint

STARTED = time.perf_counter()  # before importing torch, so that the import counts
LOCK = ".lock"
RUN_NAME = "run"
FAILED_REASONS = ("refused", "error")


def run_point(folder: Path) -> PointResult:
    """Run the point in `folder`, unless it has an outcome.

    An error becomes the outcome; only a killed process leaves none.
    """
    from workbench.sweep.point import PointResult, SweepPoint

    point = SweepPoint.read(folder)
    with _point_lock(folder):
        if (known := PointResult.read(folder)) is not None:
            return known
        record, error = _run_experiment(point)
        found = PointResult(point.key, record and record.path, error, time.perf_counter() - STARTED, _peak())
        found.write(folder)
        return found


def _run_experiment(point: SweepPoint) -> tuple[Record | None, str | None]:
    from workbench.errors import WorkbenchError
    from workbench.measure.run import run

    try:
        record = run(point.experiment, point.folder, RUN_NAME, progress=False)
    except WorkbenchError as error:
        return None, str(error)
    except Exception as error:
        traceback.print_exc()  # into the point's log
        return None, f"{type(error).__name__}: {error}"
    return record, _failed_requests(record)


def _failed_requests(record: Record) -> str | None:
    """Describe requests that were refused or failed in the run; None if there are none."""
    counts = record.summary.get("requests", {}).get("by_finish_reason", {})
    counted = [f"{counts[reason]} {reason}" for reason in FAILED_REASONS if counts.get(reason)]
    return f"of {sum(counts.values())} requests: {', '.join(counted)}" if counted else None


def _peak() -> int | None:
    from workbench.machine.processor import peak_bytes

    return peak_bytes()


@contextmanager
def _point_lock(folder: Path) -> Iterator[None]:
    """Lock a point for one process; the lock is released when the process ends, however it ends.

    On a file system without locks, several processes may enter.
    """
    import fcntl
    from contextlib import suppress

    with (folder / LOCK).open("w") as file:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def main(words: list[str]) -> int:
    from workbench.errors import WorkbenchError

    try:
        found = run_point(Path(words[0]).parent)
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if found.error is not None:
        print(f"error: {found.error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
