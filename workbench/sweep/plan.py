"""Plan a sweep without running it: its points, estimates of their time and memory, and their states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.machine.processor import MAX_CONTENTION
from workbench.sweep.estimate import COST_MODEL, MEASURED, Estimate, estimate_points
from workbench.sweep.folder import SweepFolder, find_earlier_points
from workbench.sweep.run import SweepRow, read_rows
from workbench.units import format_percent


@dataclass(frozen=True)
class PlannedPoint:
    row: SweepRow
    estimate: Estimate


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep: all points with their estimates, and remarks for the reader."""

    sweep: SweepFolder
    points: tuple[PlannedPoint, ...]
    remarks: tuple[str, ...]
    retry_failed: bool = False

    @property
    def to_run(self) -> list[PlannedPoint]:
        again = ("to run", "failed") if self.retry_failed else ("to run",)
        return [each for each in self.points if each.row.state in again]

    @property
    def seconds(self) -> float:
        """Return the total estimated seconds of the points to run, without points whose time is unknown."""
        return sum(each.estimate.seconds or 0.0 for each in self.to_run)

    @property
    def peak_bytes(self) -> int | None:
        return max((each.estimate.bytes for each in self.to_run if each.estimate.bytes), default=None)

    @property
    def is_lower_bound(self) -> bool:
        """Return whether `seconds` is a lower bound, because some estimates come from the cost model."""
        return any(each.estimate.source == COST_MODEL for each in self.to_run)

    @property
    def num_without_estimate(self) -> int:
        return sum(each.estimate.seconds is None for each in self.to_run)

    @property
    def expected_seconds(self) -> dict[str, float | None]:
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
            "most_bytes": self.peak_bytes,
            "without_estimate": self.num_without_estimate,
        }  # fmt: skip


def plan_sweep(sweep: SweepFolder, parent: Path, start_seconds: float = 0.0, retry_failed: bool = False) -> SweepPlan:
    """Plan a sweep.

    Args:
        sweep: the sweep.
        parent: folder of other sweeps, which may have run the same points.
        start_seconds: seconds that a process takes to start.
        retry_failed: count failed points among those to run.

    Raises:
        WorkbenchError: for a point with an impossible model or workload.
    """
    rows = read_rows(sweep)
    outcomes = {row.point.key: row.outcome for row in rows if row.outcome is not None}
    found = estimate_points(sweep.points, outcomes, find_earlier_points(parent, sweep.points), start_seconds)
    planned = tuple(PlannedPoint(row, found.by_key[row.point.key]) for row in rows)
    made = SweepPlan(sweep, planned, sweep.remarks, retry_failed)
    return replace(made, remarks=(*sweep.remarks, *_source_remarks(made, start_seconds, found.contention)))


def _source_remarks(made: SweepPlan, start_seconds: float, contention: float) -> list[str]:
    sources = [each.estimate.source for each in made.to_run]
    remarks = []
    if COST_MODEL in sources:
        start = f" and {start_seconds:.1f} s for a process to start, as this one did" if start_seconds else ""
        remarks.append(
            f"cost model: FLOPs and bytes of every step at this machine's measured ceilings{start}: lower bounds, "
            "without compilation and Python's time between kernels"
        )
        if contention > MAX_CONTENTION:
            remarks.append(
                f"ceilings too low: other processes used {format_percent(contention)} of the machine meanwhile"
            )
    if MEASURED in sources:
        remarks.append("measured: the same points have run in another sweep")
    if made.num_without_estimate:
        remarks.append(
            f"unknown: of {made.num_without_estimate} points shapes give no time; it is estimated after one has run"
        )
    return remarks


def row_json(row: SweepRow) -> dict[str, Any]:
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
