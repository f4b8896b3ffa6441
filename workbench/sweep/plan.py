"""Plan a sweep without running it: its points, estimates of their time and memory, and their states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.study.machine import BUSY
from workbench.sweep.estimate import MEASURED, MODEL, Estimate, estimates
from workbench.sweep.folder import SweepFolder, asked_before
from workbench.sweep.run import Row, rows_of


@dataclass(frozen=True)
class Planned:
    row: Row
    estimate: Estimate


@dataclass(frozen=True)
class Plan:
    """Every point with its estimate; `remarks` are for the reader."""

    sweep: SweepFolder
    points: tuple[Planned, ...]
    remarks: tuple[str, ...]
    retry_failed: bool = False

    @property
    def to_run(self) -> list[Planned]:
        again = ("to run", "failed") if self.retry_failed else ("to run",)
        return [each for each in self.points if each.row.state in again]

    @property
    def seconds(self) -> float:
        """Sum the estimates of all points to run, as far as they are known."""
        return sum(each.estimate.seconds or 0.0 for each in self.to_run)

    @property
    def most_bytes(self) -> int | None:
        return max((each.estimate.bytes for each in self.to_run if each.estimate.bytes), default=None)

    @property
    def bound(self) -> bool:
        """Return whether the estimates are lower bounds."""
        return any(each.estimate.source == MODEL for each in self.to_run)

    @property
    def unknown(self) -> int:
        return sum(each.estimate.seconds is None for each in self.to_run)

    @property
    def expected(self) -> dict[str, float | None]:
        return {each.row.point.key: each.estimate.seconds for each in self.points}

    def as_json(self) -> dict[str, Any]:
        return {
            "sweep": str(self.sweep.path),
            "remarks": list(self.remarks),
            "points": [
                {
                    **row_json(each.row),
                    "estimate": {
                        "seconds": each.estimate.seconds, "bytes": each.estimate.bytes, "source": each.estimate.source,
                    },
                }
                for each in self.points
            ],
            "to_run": len(self.to_run),
            "seconds": self.seconds,
            "most_bytes": self.most_bytes,
            "without_estimate": self.unknown,
        }  # fmt: skip


def plan(sweep: SweepFolder, parent: Path, start_seconds: float = 0.0, retry_failed: bool = False) -> Plan:
    """Plan a sweep.

    Args:
        sweep: the sweep.
        parent: folder of other sweeps, which may have run the same points.
        start_seconds: seconds of a process to start.
        retry_failed: count failed points among those to run.

    Raises:
        WorkbenchError: a point's model or workload is impossible.
    """
    rows = rows_of(sweep)
    outcomes = {row.point.key: row.outcome for row in rows if row.outcome is not None}
    found = estimates(sweep.points, outcomes, asked_before(parent, sweep.points), start_seconds)
    planned = tuple(Planned(row, found.of[row.point.key]) for row in rows)
    made = Plan(sweep, planned, sweep.remarks, retry_failed)
    return replace(made, remarks=(*sweep.remarks, *_sources(made, start_seconds, found.busy)))


def _sources(made: Plan, start_seconds: float, busy: float) -> list[str]:
    sources = [each.estimate.source for each in made.to_run]
    told = []
    if MODEL in sources:
        start = f" and {start_seconds:.1f} s for a process to start, as this one did" if start_seconds else ""
        told.append(
            f"cost model: FLOPs and bytes of every step at this machine's measured ceilings{start}; the least: "
            "compiling, and what Python takes between kernels, come on top"
        )
        if busy > BUSY:
            told.append(f"others had {busy:.0%} of this machine when its ceilings were measured: they are too low")
    if MEASURED in sources:
        told.append("measured: the same points have run in another sweep")
    if made.unknown:
        told.append(f"unknown: of {made.unknown} points shapes do not tell the time; it is told once one has run")
    return told


def row_json(row: Row) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "key": row.point.key,
        "label": row.point.label,
        "settings": dict(row.point.settings),
        "state": row.state,
        "run": None if outcome is None or outcome.folder is None else str(outcome.folder),
        "error": None if outcome is None else outcome.error,
        "seconds": None if outcome is None else outcome.seconds,
        "peak_bytes": None if outcome is None else outcome.peak_bytes,
    }
