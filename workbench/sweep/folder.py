"""A sweep's folder: what was asked in `sweep.yaml`, and a folder for each point below `points/`.

NAME-YYYYmmdd-HHMMSS-xxxx/
  sweep.yaml                the experiment with its sweep, and the points in their order
  points/KEY/point.json     the point's experiment
  points/KEY/run-.../       its run folder, as `workbench run` makes it
  points/KEY/outcome.json   that it is done, or why it failed; as long as it is not there, the point has not run
  points/KEY/log.txt        what its worker said
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
from workbench.sweep.axes import POINTS, expand
from workbench.sweep.point import Point, write_text

SWEEP = "sweep.yaml"


@dataclass(frozen=True)
class SweepFolder:
    """A sweep as it was asked for; `points` are all that were ever asked for in this folder."""

    path: Path
    name: str
    experiment: Experiment
    points: tuple[Point, ...]
    remarks: tuple[str, ...] = ()

    @classmethod
    def planned(cls, experiment: Experiment, parent: Path, name: str) -> SweepFolder:
        """With a new name below `parent`; nothing is written. WorkbenchError where a point is wrong."""
        path = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        found = expand(experiment, path)
        return cls(path, name, experiment, found.points, found.remarks)

    @classmethod
    def read(cls, path: Path) -> SweepFolder:
        """WorkbenchError where no sweep is there."""
        try:
            values = read_yaml_file(path / SWEEP)
            name, keys = values["name"], [each["key"] for each in values["points"]]
            experiment = Experiment.of(values["experiment"], str(path / SWEEP))
        except (LookupError, TypeError, ValueError) as error:
            told = f" ({error})" if isinstance(error, WorkbenchError) else ""
            raise WorkbenchError(f"{path}: is no sweep's folder, which has a {SWEEP}{told}") from None
        return cls(path, name, experiment, tuple(Point.read(path / POINTS / key) for key in keys))

    def extended(self, experiment: Experiment) -> SweepFolder:
        """This with the points of another sweep besides; those that both have are the same."""
        found = expand(experiment, self.path)
        points = {point.key: point for point in (*self.points, *found.points)}
        return replace(self, experiment=experiment, points=tuple(points.values()), remarks=found.remarks)

    def write(self) -> None:
        """The points first: what `sweep.yaml` names is there."""
        for point in self.points:
            point.write()
        points = [{"key": point.key, "label": point.label} for point in self.points]
        values = {"name": self.name, "points": points, "experiment": self.experiment.model_dump(mode="json")}
        write_text(self.path / SWEEP, yaml_text.write(values))


def asked_before(parent: Path, points: Sequence[Point]) -> dict[str, Path]:
    """For points that another sweep below `parent` has had, the folders they have there."""
    others = [path.parent / POINTS for path in parent.glob(f"*/{SWEEP}")]
    found = {point.key: other / point.key for other in others for point in points if (other / point.key).is_dir()}
    own = {point.folder for point in points}
    return {key: folder for key, folder in found.items() if folder not in own}
