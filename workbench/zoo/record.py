"""Store the measurement of an entry as one small file in the entries' folder: `records/NAME.json`."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.claims.stored_record import describe_machine
from workbench.errors import WorkbenchError, cannot_write
from workbench.experiment.verdict import Outcome
from workbench.files import read_json_file, write_atomically
from workbench.machine.environment import environment
from workbench.machine.processor import contention_remark
from workbench.runs.folder import finite_json
from workbench.settings import non_default_settings
from workbench.testing.law import ConformityReport
from workbench.zoo.entry import LoadedEntry
from workbench.zoo.measure import Figures, MeasuredEntry
from workbench.zoo.question import experiment_of

RECORDS = "records"
_ENVIRONMENT = ("python", "platform", "machine", "packages", "memory_bytes", "threads", "gpu", "commit")
_PROCESSOR = ("model", "usable_cores", "level")


@dataclass(frozen=True)
class LawCount:
    """Laws of an entry's kits: the number tried, and the names of broken laws."""

    tried: int = 0
    broken: tuple[str, ...] = ()

    @classmethod
    def of(cls, reports: Sequence[ConformityReport]) -> LawCount:
        laws = [law for report in reports for law in report.laws if law.tried]
        return cls(len(laws), tuple(law.law for law in laws if not law.ok))

    def __str__(self) -> str:
        return f"{self.tried - len(self.broken)} of {self.tried}" if self.tried else ""


@dataclass(frozen=True)
class ZooRecord:
    """A measurement of one entry. `entry` and `experiment` hold the settings measured, as plain values."""

    name: str
    date: str
    machine: str
    figures: Figures
    outcome: Outcome
    reason: str
    laws: LawCount
    backends: dict[str, str]
    others_cpu_share: float | None
    entry: dict[str, Any]
    experiment: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def create(cls, entry: LoadedEntry, measured: MeasuredEntry, reports: Sequence[ConformityReport]) -> ZooRecord:
        """Judge a measurement by the entry's rule, and describe its machine."""
        now = environment()
        small = {name: now[name] for name in _ENVIRONMENT}
        small["cpu"] = {name: now["cpu"].get(name) for name in _PROCESSOR}
        return cls(
            entry.name,
            now["date"],
            describe_machine(now, measured.experiment.model_dump(mode="json")),
            measured.figures,
            entry.rule.outcome(measured.figures),
            entry.rule.reason(measured.figures),
            LawCount.of(reports),
            measured.backends,
            measured.others_cpu_share,
            fingerprint_of(entry),
            settings_of(entry),
            small,
        )

    @classmethod
    def read(cls, file: Path) -> ZooRecord | None:
        """Read a record; None if the file does not exist. WorkbenchError for an invalid record."""
        if not file.is_file():
            return None
        try:
            values = read_json_file(file)
            laws = LawCount(values["laws"]["tried"], tuple(values["laws"]["broken"]))
            return cls(**{**values, "laws": laws})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise WorkbenchError(
                f"{file}: is no record of the zoo ({error}); `workbench zoo run {file.stem}` writes it anew"
            ) from None

    def write(self, file: Path) -> Path:
        text = json.dumps(finite_json(asdict(self)), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, lambda out: out.write(text.encode()))
        except OSError as error:
            raise cannot_write(str(file), error) from None
        return file

    def remarks(self, entry: LoadedEntry) -> list[str]:
        """Return warnings: contention, or an entry that has been changed since."""
        found = []
        if remark := contention_remark(self.others_cpu_share):
            found.append(remark)
        if self.is_outdated(entry):
            found.append(f"the entry has been changed since: `workbench zoo run {entry.name}`")
        return found

    def is_outdated(self, entry: LoadedEntry) -> bool:
        """Return whether the entry's settings, rule or code have changed since the measurement."""
        return self.entry != fingerprint_of(entry) or self.experiment != settings_of(entry)


def record_file(entry: LoadedEntry) -> Path:
    return entry.yaml_file.parent / RECORDS / f"{entry.name}.json"


def fingerprint_of(entry: LoadedEntry) -> dict[str, Any]:
    """Return the inputs of a measurement and the rule; docstring, comments and `held` are left out."""
    tree = ast.parse(entry.source_file.read_text(encoding="utf-8"))
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    code = "\n".join(ast.dump(node) for node in body)
    decides = {"use", "baseline", "rule", "workload"}
    return {
        **entry.settings.model_dump(mode="json", include=decides),
        "code": hashlib.sha256(code.encode()).hexdigest()[:16] if body else "",
    }


def settings_of(entry: LoadedEntry) -> dict[str, Any]:
    """Return the non-default settings of the entry's experiment, by dotted path."""
    found = non_default_settings(experiment_of(entry))
    hidden = ("question", "variants.")
    plain = {path: value for path, value in found if not path.startswith(hidden)}
    return json.loads(json.dumps(plain, default=str))
