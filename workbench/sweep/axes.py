"""Expand an experiment into the points of its sweep: one experiment for every combination of its axes.

Points are labelled by the settings that differ between them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import Sweep, paths_overlap
from workbench.experiment.variants import AS_GIVEN
from workbench.sweep.point import SweepPoint

MAX_POINTS = 100_000
SEED_PATHS = ("sampling.seed", "workload.seed")  # if the experiment has them
SEED_STRIDE = 1_000_000  # a run's requests take consecutive seeds from its seed on; repetitions must not overlap
POINTS = "points"


@dataclass(frozen=True)
class AxisChoice:
    """One value of a sweep's axis: the settings that it changes (dotted path -> value), and its name if it is a
    variant."""

    settings: Mapping[str, Any]
    name: str | None = None


def label_points(experiment: Experiment, choices: Sequence[AxisChoice]) -> list[str]:
    """Return one label for each choice, in order; if a choice is a variant, its name stands for the variant's
    settings."""
    base = experiment.model_dump(mode="json", exclude={"variants", "sweep", "judge"})
    named = any(choice.name is not None for choice in choices)
    inside = {path for settings in experiment.variants.values() for path in settings} if named else set()
    paths = dict.fromkeys(path for choice in choices for path in choice.settings if path not in inside)
    rows = [
        {path: format_value(choice.settings.get(path, value_at(base, path))) for path in paths} for choice in choices
    ]
    differing = [path for path in paths if len({row[path] for row in rows}) > 1]
    labels = []
    for choice, row in zip(choices, rows, strict=True):
        words = [] if choice.name is None else [choice.name]
        labels.append(" ".join(words + [f"{path}={row[path]}" for path in differing]) or AS_GIVEN)
    return labels


def value_at(values: Any, path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    for piece in path.split("."):
        values = values.get(piece) if isinstance(values, Mapping) else None
    return values


def format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class ExpandedSweep:
    """The points of a sweep, and remarks on how they were derived."""

    points: tuple[SweepPoint, ...]
    remarks: tuple[str, ...]


def expand_sweep(experiment: Experiment, folder: Path) -> ExpandedSweep:
    """Expand `experiment`'s sweep into points with folders below `folder`, in the order of running.

    All points come once, then all again with the next seeds, for as many repetitions as the sweep has.

    Raises:
        WorkbenchError: the message lists all errors of all points.
    """
    sweep = experiment.sweep or Sweep()
    axes, remarks = _axes(experiment, sweep)
    count = math.prod(map(len, axes)) * sweep.repeat
    if count > MAX_POINTS:
        raise WorkbenchError(f"sweep: {count:,} points; at most {MAX_POINTS:,} can be planned")
    combined = [_combined(choices) for choices in itertools.product(*axes)]
    labels = label_points(experiment, combined)
    made: list[tuple[str, Mapping[str, Any], Experiment]] = []
    wrong: dict[str, list[str]] = {}
    for repetition, (index, choice) in itertools.product(range(sweep.repeat), enumerate(combined)):
        label = labels[index] + (f" #{repetition + 1}" if sweep.repeat > 1 else "")
        try:
            made.append((label, *_point(experiment, choice.settings, repetition)))
        except WorkbenchError as error:
            wrong.setdefault(str(error).removeprefix("sweep: "), []).append(label)
    if wrong:
        message = "; ".join(f"{error} (in {_count_and_names(names, count)})" for error, names in wrong.items())
        raise WorkbenchError(f"sweep: {message}")
    points: dict[str, SweepPoint] = {}
    for label, settings, each in made:
        point = SweepPoint.from_settings(each, label, settings, folder / POINTS)
        first = points.setdefault(point.key, point)
        if first is not point:
            remarks.append(f"{label} is the same experiment as {first.label}: it runs once")
    return ExpandedSweep(tuple(points.values()), tuple(remarks))


def _axes(experiment: Experiment, sweep: Sweep) -> tuple[list[list[AxisChoice]], list[str]]:
    axes = [[AxisChoice({path: value}) for value in values] for path, values in sweep.axes.items()]
    for group in sweep.linked:
        places = zip(*group.values(), strict=True)
        axes.append([AxisChoice(dict(zip(group, values, strict=True))) for values in places])
    if sweep.overrides:
        axes.append([AxisChoice(each) for each in sweep.overrides])
    remarks = []
    if experiment.judge is not None:
        remarks.append("the judge is ignored: it judges the rows of one run, and each point is a run of its own")
    if experiment.measure.rounds > 1 and not experiment.workload.is_comparison:
        remarks.append("measure.rounds is ignored: it is for several variants, a point has one; use --repeat")
    if not experiment.variants:
        return axes, remarks
    swept = [path for group in sweep.groups() for path in group]
    both = [path for path in swept if any(paths_overlap(path, own) for v in experiment.variants.values() for own in v)]
    if both:
        paths = ", ".join(both)
        remarks.append(f"the {len(experiment.variants)} variants are set aside: they set {paths}, as the sweep does")
        return axes, remarks
    return [[AxisChoice(settings, name) for name, settings in experiment.variants.items()], *axes], remarks


def _combined(choices: Sequence[AxisChoice]) -> AxisChoice:
    """Merge choices into one: all their settings, and the name of the variant if there is one."""
    settings = {path: value for choice in choices for path, value in choice.settings.items()}
    return AxisChoice(settings, next((choice.name for choice in choices if choice.name is not None), None))


def _point(experiment: Experiment, settings: Mapping[str, Any], repetition: int) -> tuple[dict[str, Any], Experiment]:
    fixed = {} if experiment.workload.is_comparison else {"measure.rounds": 1}
    made = experiment.single({**fixed, **settings}, "sweep")
    if repetition == 0:
        return dict(settings), made
    seeds = {path: seed + repetition * SEED_STRIDE for path, seed in _seeds(made)}
    return {**settings, **seeds}, made.single(seeds, "sweep")


def _seeds(experiment: Experiment) -> Iterator[tuple[str, int]]:
    values = experiment.model_dump(mode="json")
    for path in SEED_PATHS:
        if isinstance(seed := value_at(values, path), int):
            yield path, seed


def _count_and_names(names: Sequence[str], count: int) -> str:
    if len(names) == count:
        return f"all {count} points" if count > 1 else "the only point"
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} of {count} points: {shown}"
