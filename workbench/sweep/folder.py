"""Read and write a sweep's folder: the sweep in `sweep.yaml`, and a folder for each point below `points/`.

NAME-YYYYmmdd-HHMMSS-xxxx/
  sweep.yaml                the experiment with its sweep, and the points in their order
  points/KEY/point.json     the point's experiment
  points/KEY/run-.../       its run folder, as written by `workbench run`
  points/KEY/outcome.json   result or error; without this file the point has not run
  points/KEY/log.txt        the worker's output

A new sweep is opened from options: `--set path=value,value` is an axis, `--zip` links axes, `--repeat` repeats.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.errors import WorkbenchError, explain
from workbench.experiment import yaml as yaml_text
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import Sweep, paths_overlap
from workbench.files import UnreadableText, read_yaml, read_yaml_file
from workbench.sweep.axes import POINTS, expand_sweep
from workbench.sweep.point import PointResult, SweepPoint, write_text

SWEEP = "sweep.yaml"


@dataclass(frozen=True)
class SweepFolder:
    """A sweep and its folder; `points` are all points ever added to it."""

    path: Path
    name: str
    experiment: Experiment
    points: tuple[SweepPoint, ...]
    remarks: tuple[str, ...] = ()

    @classmethod
    def create(cls, experiment: Experiment, parent: Path, name: str) -> SweepFolder:
        """Create a sweep with a new name below `parent`, without writing it. WorkbenchError if a point is invalid."""
        path = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        found = expand_sweep(experiment, path)
        return cls(path, name, experiment, found.points, found.remarks)

    @classmethod
    def read(cls, path: Path) -> SweepFolder:
        """Read the sweep at `path`. WorkbenchError if there is none."""
        try:
            values = read_yaml_file(path / SWEEP)
            name, keys = values["name"], [each["key"] for each in values["points"]]
            experiment = Experiment.from_values(values["experiment"], str(path / SWEEP))
        except (LookupError, TypeError, ValueError) as error:
            cause = f" ({error})" if isinstance(error, WorkbenchError) else ""
            raise WorkbenchError(f"{path}: is no sweep folder: it has no valid {SWEEP}{cause}") from None
        return cls(path, name, experiment, tuple(SweepPoint.read(path / POINTS / key) for key in keys))

    def extend(self, experiment: Experiment) -> SweepFolder:
        """Return the sweep with the points of another experiment added; points that are in both are kept once."""
        found = expand_sweep(experiment, self.path)
        points = {point.key: point for point in (*self.points, *found.points)}
        return replace(self, experiment=experiment, points=tuple(points.values()), remarks=found.remarks)

    def write(self) -> None:
        """Write the points, and then `sweep.yaml`, so that all points that this file names exist."""
        for point in self.points:
            point.write()
        points = [{"key": point.key, "label": point.label} for point in self.points]
        values = {"name": self.name, "points": points, "experiment": self.experiment.model_dump(mode="json")}
        write_text(self.path / SWEEP, yaml_text.write_yaml(values))


def find_earlier_points(parent: Path, points: Sequence[SweepPoint]) -> dict[str, Path]:
    """Return the folders of points that already ran without an error in other sweeps below `parent`, by key. Of several
    folders for one point, it is the one of the last sweep by name."""
    others = sorted(path.parent / POINTS for path in parent.glob(f"*/{SWEEP}"))
    folders = (other / point.key for other in others for point in points if other / point.key != point.folder)
    outcomes = {folder: PointResult.read(folder) for folder in folders if folder.is_dir()}
    return {folder.name: folder for folder, each in outcomes.items() if each is not None and each.error is None}


def experiment_with_axes(
    file: Path | Experiment, sets: Sequence[str] = (), zips: Sequence[str] = (), repeat: int | None = None
) -> Experiment:
    """Return the experiment (or the one in a file) with its sweep extended by the options.

    Options take precedence over the sweep: a single value changes the experiment and removes the axis, several values
    become the axis. All of `zips` form one group.
    """
    words = [(word, *_parse_values(word, "--set")) for word in sets]
    plain = tuple(word for word, _, values in words if len(values) == 1)
    fixed = {path for _, path, values in words if len(values) == 1}
    axes = {path: values for _, path, values in words if len(values) > 1}
    linked = dict(_parse_values(word, "--zip") for word in zips)
    experiment = file.with_(*plain) if isinstance(file, Experiment) else Experiment.from_file(file, plain)
    own = experiment.sweep or Sweep()
    kept = {path: values for path, values in own.axes.items() if path not in fixed}
    for path in fixed:
        for swept in [*kept, *axes, *(path for group in (*own.linked, *own.overrides) for path in group), *linked]:
            if paths_overlap(path, swept):
                raise WorkbenchError(f"--set {path}: the sweep sets {swept}, so this would have no effect")
    try:
        groups = [*own.linked, *([linked] if linked else [])]
        changes = {"axes": {**kept, **axes}, "linked": groups, "repeat": own.repeat if repeat is None else repeat}
        sweep = Sweep.model_validate({**own.model_dump(), **changes})
    except ValidationError as error:
        raise explain(error, "sweep", Sweep) from None
    return experiment.model_copy(update={"sweep": sweep})


def open_sweep(source: Experiment | Path | str, sets: Sequence[str], out: Path) -> SweepFolder:
    """Open a sweep: a new one below `out` for an experiment or its file, or an existing one by its folder.

    The points of `sets` are added to an existing sweep.
    """
    if isinstance(source, Experiment):
        return SweepFolder.create(experiment_with_axes(source, sets), out, "sweep")
    path = Path(source)
    if not path.is_dir():
        return SweepFolder.create(experiment_with_axes(path, sets), out, path.stem)
    found = SweepFolder.read(path)
    return found.extend(experiment_with_axes(found.experiment, sets)) if sets else found


def _parse_values(word: str, option: str) -> tuple[str, list[Any]]:
    """Split `PATH=VALUE,VALUE` into path and values; commas within brackets and quotes do not separate values."""
    path, equals, text = word.partition("=")
    if not equals or not path:
        raise WorkbenchError(
            f"{option} {word}: write it as path=value,value, for example {option} cache.format=int8,int4"
        )
    try:
        values = read_yaml(f"[{text}\n]")
    except UnreadableText:
        values = [text]
    if not values:
        raise WorkbenchError(f"{option} {word}: names no value")
    return path, values
