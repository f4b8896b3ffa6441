"""A point of a sweep: one experiment with a folder of its own, and what became of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.study.experiment import Experiment
from workbench.study.run_folder import MANIFEST, MARKER, strict, write_atomically

POINT, OUTCOME, LOG = "point.json", "outcome.json", "log.txt"
KEY_DIGITS = 16


@dataclass(frozen=True)
class Point:
    """One experiment of a sweep. `key` is the hash of all that is written in it, `label` made of the settings in which
    it differs from its neighbours, `settings` those (dotted path -> value); its run folder is made in `folder`."""

    key: str
    label: str
    settings: Mapping[str, Any]
    experiment_text: str
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> Point:
        """The point that a folder belongs to. WorkbenchError where none is written there."""
        try:
            values = json.loads((folder / POINT).read_bytes())
            return cls(values["key"], values["label"], values["settings"], values["experiment"], folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WorkbenchError(f"{folder / POINT}: is no point of a sweep ({type(error).__name__})") from None

    def write(self) -> None:
        """Into its folder, which is made; whole or not at all."""
        values = {"key": self.key, "label": self.label, "settings": dict(self.settings)}
        write_json(self.folder / POINT, values | {"experiment": self.experiment_text})

    @property
    def experiment(self) -> Experiment:
        return Experiment.from_yaml(self.experiment_text, where=f"point {self.label}")


@dataclass(frozen=True)
class Outcome:
    """What became of a point: its run folder, or the error, or both where a run was recorded in which requests
    failed. `seconds` and `peak_bytes` are those of the process that ran it, from its start to its end."""

    key: str
    folder: Path | None
    error: str | None
    seconds: float
    peak_bytes: int | None = None

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """That of the point in `folder`; None where there is none yet, or what it speaks of is not there any more."""
        try:
            values = json.loads((folder / OUTCOME).read_bytes())
            run = None if values["run"] is None else folder / values["run"]
            found = cls(values["key"], run, values["error"], values["seconds"], values["peak_bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        gone = run is not None and (not (run / MANIFEST).is_file() or (run / MARKER).exists())
        return None if gone or found.key != folder.name else found

    def write(self, folder: Path) -> None:
        """Into the point's folder, whole or not at all."""
        run = None if self.folder is None else self.folder.name
        values = {"key": self.key, "run": run, "error": self.error, "seconds": self.seconds}
        write_json(folder / OUTCOME, values | {"peak_bytes": self.peak_bytes})


def key_of(experiment: Experiment) -> str:
    """The same for equal experiments in any process and on any machine, whatever the order they were written in."""
    text = json.dumps(experiment.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:KEY_DIGITS]


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(strict(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """The file whole or not at all. WorkbenchError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(text.encode("utf-8", "backslashreplace")))
    except OSError as error:
        raise WorkbenchError(f"{path}: cannot be written ({error.strerror or error})") from error
