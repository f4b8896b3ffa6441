"""Represent a point of a sweep: one experiment with its own folder, and its outcome."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.files import read_json_file, write_atomically
from workbench.runs.condition import check_folder

POINT, OUTCOME, LOG = "point.json", "outcome.json", "log.txt"
KEY_DIGITS = 16


@dataclass(frozen=True)
class SweepPoint:
    """One experiment of a sweep.

    `experiment_text` is the experiment in canonical JSON and `key` its hash. `label` names the settings in which the
    point differs from others; `settings` are the sweep's settings (dotted path -> value). `folder` will contain the run
    folder.
    """

    key: str
    label: str
    settings: Mapping[str, Any]
    experiment_text: str
    folder: Path

    @classmethod
    def from_settings(cls, experiment: Experiment, label: str, settings: Mapping[str, Any], parent: Path) -> SweepPoint:
        """Make a point of `experiment`, with a folder below `parent`."""
        text = _canonical(experiment.model_dump(mode="json"))
        return cls(_hash(text), label, settings, text, parent / _hash(text))

    @classmethod
    def read(cls, folder: Path) -> SweepPoint:
        """Read the point in a folder. WorkbenchError if there is none, or if it was changed."""
        try:
            values = read_json_file(folder / POINT)
            text = _canonical(values["experiment"])
            found = cls(values["key"], values["label"], values["settings"], text, folder)
        except (ValueError, LookupError, TypeError) as error:
            raise WorkbenchError(f"{folder / POINT}: is no point of a sweep ({type(error).__name__})") from None
        if not found.key == _hash(text) == folder.name:
            raise WorkbenchError(f"{folder / POINT}: was changed since it was planned; plan another sweep")
        return found

    def write(self) -> None:
        """Write the point atomically into its folder, creating the folder."""
        values = {"key": self.key, "label": self.label, "settings": dict(self.settings)}
        write_json(self.folder / POINT, values | {"experiment": json.loads(self.experiment_text)})

    @property
    def experiment(self) -> Experiment:
        return Experiment.from_values(json.loads(self.experiment_text), f"point {self.label}")


@dataclass(frozen=True)
class PointResult:
    """The result of a point: its run folder, or an error, or both if requests failed in a recorded run.

    `seconds` and `peak_bytes` cover the worker's whole process.
    """

    key: str
    folder: Path | None
    error: str | None
    seconds: float
    peak_bytes: int | None = None

    @classmethod
    def read(cls, folder: Path) -> PointResult | None:
        """Read the outcome of the point in `folder`; None if it is missing, or its run folder is damaged."""
        try:
            values = read_json_file(folder / OUTCOME)
            run = None if values["run"] is None else folder / values["run"]
            found = cls(values["key"], run, values["error"], values["seconds"], values["peak_bytes"])
        except (ValueError, LookupError, TypeError):
            return None
        gone = run is not None and not (run.is_dir() and check_folder(run).state == "complete")
        return None if gone or found.key != folder.name else found

    def write(self, folder: Path) -> None:
        """Write the outcome atomically into the point's folder."""
        run = None if self.folder is None else self.folder.name
        values = {"key": self.key, "run": run, "error": self.error, "seconds": self.seconds}
        write_json(folder / OUTCOME, values | {"peak_bytes": self.peak_bytes})


def key_of(experiment: Experiment) -> str:
    """Return the key of an experiment, which is equal for equal experiments, in any process, on any machine, and with
    settings in any order.
    """
    return _hash(_canonical(experiment.model_dump(mode="json")))


def _canonical(values: Any) -> str:
    return json.dumps(values, sort_keys=True, ensure_ascii=False)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:KEY_DIGITS]


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write the file atomically. WorkbenchError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(text.encode("utf-8", "backslashreplace")))
    except OSError as error:
        raise WorkbenchError(f"{path}: cannot be written ({error.strerror or error})") from error
