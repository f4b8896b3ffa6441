"""Read a sweep's folder for a report: all its points, failed and pending ones included.

The files are those of `workbench sweep`: sweep.yaml, points/KEY/point.json, outcome.json and the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_bytes, read_json_object, read_yaml_file
from workbench.study.record import Record

SWEEP, POINTS, POINT, OUTCOME = "sweep.yaml", "points", "point.json", "outcome.json"


@dataclass(frozen=True)
class StoredPoint:
    """A point as stored.

    `settings` are those of the sweep (dotted path -> value); without record and error it has not run.
    """

    number: int
    key: str
    label: str
    settings: Mapping[str, Any]
    record: Record | None
    error: str | None

    @property
    def anchor(self) -> str:
        return f"point-{self.number}"

    @property
    def state(self) -> str:
        return "failed" if self.error else "done" if self.record else "not run"


@dataclass(frozen=True)
class StoredSweep:
    path: Path
    name: str
    experiment: Mapping[str, Any] = field(repr=False)
    points: tuple[StoredPoint, ...] = field(repr=False)

    @property
    def counts(self) -> dict[str, int]:
        states = [point.state for point in self.points]
        return {state: states.count(state) for state in ("done", "failed", "not run") if state in states}


def is_sweep(path: Path) -> bool:
    return (path / SWEEP).is_file()


def read_sweep(path: Path) -> StoredSweep:
    """Read a sweep's folder.

    WorkbenchError where `sweep.yaml` cannot be read; a damaged point has an `error` instead.
    """
    try:
        values = read_yaml_file(path / SWEEP)
        named = [(str(each["key"]), str(each["label"])) for each in values["points"]]
        experiment, name = dict(values["experiment"]), str(values["name"])
    except (ValueError, LookupError, TypeError) as error:
        raise WorkbenchError(f"{path / SWEEP}: cannot be read as a sweep's ({type(error).__name__}: {error})") from None
    points = (_point(path / POINTS / key, number, key, label) for number, (key, label) in enumerate(named, 1))
    return StoredSweep(path, name, experiment, tuple(points))


def _point(folder: Path, number: int, key: str, label: str) -> StoredPoint:
    settings = _object(folder / POINT).get("settings")
    outcome = _object(folder / OUTCOME)
    error, run = outcome.get("error"), outcome.get("run")
    record = None
    if run:
        try:
            record = Record.open(folder / Path(str(run)).name)
        except WorkbenchError as found:
            error = error or str(found)
    message = str(error) if error else None
    return StoredPoint(number, key, label, settings if isinstance(settings, dict) else {}, record, message)


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(read_bytes(path))
    except UnreadableText:
        return {}
