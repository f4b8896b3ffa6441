"""A sweep's folder: the sweep in `sweep.yaml`, and a folder for each point below `points/`.

NAME-YYYYmmdd-HHMMSS-xxxx/
  sweep.yaml                the experiment with its sweep, and the points in their order
  points/KEY/point.json     the point's experiment
  points/KEY/run-.../       its run folder, as `workbench run` makes it
  points/KEY/outcome.json   that it is done, or why it failed; as long as it is not there, the point has not run
  points/KEY/log.txt        the worker's output
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import read_yaml_file
from workbench.study import yaml_text
from workbench.study.experiment import Experiment
from workbench.sweep.axes import POINTS, expand_sweep
from workbench.sweep.point import SweepPoint, write_text

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
        """Create a sweep with a new name below `parent`; nothing is written. WorkbenchError where a point is wrong."""
        path = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        found = expand_sweep(experiment, path)
        return cls(path, name, experiment, found.points, found.remarks)

    @classmethod
    def read(cls, path: Path) -> SweepFolder:
        """Read the sweep at `path`. WorkbenchError where none is there."""
        try:
            values = read_yaml_file(path / SWEEP)
            name, keys = values["name"], [each["key"] for each in values["points"]]
            experiment = Experiment.from_values(values["experiment"], str(path / SWEEP))
        except (LookupError, TypeError, ValueError) as error:
            cause = f" ({error})" if isinstance(error, WorkbenchError) else ""
            raise WorkbenchError(f"{path}: is no sweep's folder, which has a {SWEEP}{cause}") from None
        return cls(path, name, experiment, tuple(SweepPoint.read(path / POINTS / key) for key in keys))

    def extend(self, experiment: Experiment) -> SweepFolder:
        """Add the points of another sweep; points in both are the same."""
        found = expand_sweep(experiment, self.path)
        points = {point.key: point for point in (*self.points, *found.points)}
        return replace(self, experiment=experiment, points=tuple(points.values()), remarks=found.remarks)

    def write(self) -> None:
        """Write points, then `sweep.yaml`, so that whatever it names exists."""
        for point in self.points:
            point.write()
        points = [{"key": point.key, "label": point.label} for point in self.points]
        values = {"name": self.name, "points": points, "experiment": self.experiment.model_dump(mode="json")}
        write_text(self.path / SWEEP, yaml_text.write_yaml(values))


def find_earlier_points(parent: Path, points: Sequence[SweepPoint]) -> dict[str, Path]:
    """Return the folders of points that another sweep below `parent` has, by key."""
    others = [path.parent / POINTS for path in parent.glob(f"*/{SWEEP}")]
    found = {point.key: other / point.key for other in others for point in points if (other / point.key).is_dir()}
    own = {point.folder for point in points}
    return {key: folder for key, folder in found.items() if folder not in own}
