"""Estimate time and memory of points from points that have run, else from the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from workbench.errors import WorkbenchError
from workbench.experiment.experiment import ServedRequests, WorkloadCost
from workbench.machine.processor import resident_bytes
from workbench.sweep.point import PointResult, SweepPoint
from workbench.sweep.point_cost import CachedCeilings, cost_key, point_cost, served_bytes, served_seconds

COST_MODEL, MEASURED, SCALED_COST_MODEL, UNKNOWN = (
    "cost model",
    "measured",
    "cost model, scaled to {} that ran",
    "unknown",
)


@dataclass(frozen=True)
class Estimate:
    """The estimated seconds and bytes of one point, None if unknown, with their source. Values of the cost model are
    lower bounds."""

    seconds: float | None
    bytes: int | None
    source: str


@dataclass(frozen=True)
class Estimates:
    """The estimates of all points, by the points' keys.

    `contention` is the share of the processor used by other processes when this machine's ceilings were measured.
    """

    by_key: Mapping[str, Estimate]
    contention: float = 0.0


def estimate_points(
    points: Sequence[SweepPoint],
    outcomes: Mapping[str, PointResult],
    earlier_folders: Mapping[str, Path],
    start_seconds: float = 0.0,
) -> Estimates:
    """Estimate every point.

    A point that has run, here (`outcomes`) or in another sweep (`earlier_folders`), gets its measured values. Other
    points get the cost model's lower bounds for this machine; once points have run, these bounds are scaled by the
    median ratio of measured values to bounds.

    Args:
        points: the points, in their order.
        outcomes: outcomes in this sweep, by key.
        earlier_folders: folders of the same points in other sweeps, by key.
        start_seconds: seconds that a process takes to start, included in the bounds.

    Raises:
        WorkbenchError: the message lists every point whose model or workload is impossible.
    """
    costs, bounds = _costs(points), _LowerBounds(start_seconds)
    bounds_by_key = {key: bounds.of_cost(cost) for key, cost in costs.items()}
    ran = {point.key: found for point in points if (found := _measured(point, outcomes, earlier_folders)) is not None}
    seconds = _scale_bounds(bounds_by_key, {key: each.seconds for key, each in ran.items()}, 0)
    size = _scale_bounds(bounds_by_key, {key: each.peak_bytes for key, each in ran.items()}, 1)
    found = {}
    for key in bounds_by_key:
        source = (
            MEASURED
            if key in ran
            else SCALED_COST_MODEL.format(len(ran))
            if ran
            else UNKNOWN
            if costs[key] is None
            else COST_MODEL
        )
        found[key] = Estimate(seconds[key], size[key], source)
    return Estimates(found, bounds.machine.contention)


def _scale_bounds(least: Mapping[str, Sequence], measured: Mapping[str, float | None], which: int) -> dict[str, Any]:
    """Return by key the measured value, else the bound scaled by measured ones, else the median of measured values."""
    known = {key: value for key, value in measured.items() if value}
    bounds = {key: each[which] for key, each in least.items()}
    factors = [value / bounds[key] for key, value in known.items() if bounds[key]]
    usual, factor = (median(known.values()) if known else None), (median(factors) if factors else 1.0)
    return {key: known.get(key) or (usual if bound is None else bound * factor) for key, bound in bounds.items()}


def _costs(points: Sequence[SweepPoint]) -> dict[str, WorkloadCost | None]:
    costs: dict[str, WorkloadCost | None] = {}
    wrong: dict[str, list[str]] = {}
    for point in points:
        try:
            costs[point.key] = point_cost(point.experiment)
        except WorkbenchError as error:
            wrong.setdefault(str(error), []).append(point.label)
    if wrong:
        message = "; ".join(f"{error} (in {', '.join(names)})" for error, names in wrong.items())
        raise WorkbenchError(f"sweep: {message}")
    return costs


class _LowerBounds:
    """Lower bounds of points; equal workloads are computed once."""

    def __init__(self, start_seconds: float) -> None:
        self.start, self.process = start_seconds, resident_bytes()
        self.machine = CachedCeilings()
        self.known: dict[str, tuple[float, int]] = {}

    def of_cost(self, cost: WorkloadCost | None) -> tuple[float | None, int | None]:
        """Return (seconds, bytes); None for an unknown bound."""
        if cost is None:
            return None, None
        each = [self._served(served) for served in cost.served]
        seconds = max(cost.min_seconds, sum(seconds for seconds, _ in each))
        return self.start + seconds, self.process + cost.other_bytes + sum(size for _, size in each)

    def _served(self, served: ServedRequests) -> tuple[float, int]:
        key = cost_key(served)
        if key not in self.known:
            self.known[key] = served_seconds(served, self.machine), served_bytes(served)
        return self.known[key]


def _measured(
    point: SweepPoint, outcomes: Mapping[str, PointResult], earlier_folders: Mapping[str, Path]
) -> PointResult | None:
    found = outcomes.get(point.key)
    if found is None and point.key in earlier_folders:
        found = PointResult.read(earlier_folders[point.key])
    return None if found is None or found.error is not None else found
