"""Store what was measured for a claim: `records/NAME.json` beside it has a line for each trial, model and machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, cannot_write
from workbench.files import read_json_file, write_atomically
from workbench.machine.processor import is_contended

Figures = Mapping[str, float | str | None]  # None: not measured
RECORDS = "records"
_ENVIRONMENT = ("python", "platform", "packages", "threads", "commit")


@dataclass(frozen=True)
class LawCount:
    """Laws of a technique's kits: the number tried, and the names of broken laws."""

    tried: int = 0
    broken: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.tried - len(self.broken)} of {self.tried}" if self.tried else ""


@dataclass(frozen=True)
class Summary:
    """The figures of one trial, on one model and machine. Verdicts are made from them by the present rule.

    Attributes:
        trial: label of the trial.
        figures: numbers by name; texts are shown only.
        model: model of the experiment; empty where none is run.
        machine: processor, cores and memory; the GPU; the simulated hardware; or the origin of a calculation.
        level: the processor's instruction set (`workbench.machine.processor.LEVELS`).
        others_cpu_share: share of the processor that other processes had; None where that changes no figure.
        inputs: digest of what decides the figures, and of the rule.
        record: name of the run.
        laws: laws of a technique.
        backends: backends of a technique's variants.
        environment: versions, threads and commit.
    """

    trial: str
    figures: Figures
    model: str = ""
    machine: str = ""
    level: str | None = None
    date: str = ""
    others_cpu_share: float | None = None
    inputs: str = ""
    record: str = ""
    laws: LawCount = LawCount()
    backends: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_noisy(self) -> bool:
        """Return whether contention makes its times unreliable."""
        return is_contended(self.others_cpu_share)

    def replaces(self, other: Summary) -> bool:
        """Return whether `other` need not be kept beside this one: the same trial, model and machine, no quieter."""
        same = all(getattr(self, name) == getattr(other, name) for name in ("trial", "model", "machine", "level"))
        return same and (other.is_noisy or not self.is_noisy)


def measured_on(environment: Mapping[str, Any], experiment: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of a summary that describe its machine and model.

    Args:
        environment: `workbench.machine.environment.environment()`.
        experiment: plain settings of the experiment; None without one.
    """
    settings = experiment or {}
    model = settings.get("model") or {}
    executor = settings.get("executor") or {}
    simulated, on_gpu = executor.get("kind") == "simulated", model.get("device", "cpu") != "cpu"
    cpu = environment["cpu"]
    if simulated:
        hardware = executor["hardware"]
        name = hardware if isinstance(hardware, str) else hardware.get("name", "given hardware")
        machine = f"simulated: {executor.get('instances', 1) * executor.get('gpus', 1)} x {name}"
    elif on_gpu and environment.get("gpu"):
        machine = ", ".join(environment["gpu"])
    else:
        size = environment.get("memory_bytes")
        words = [cpu["model"], f"{cpu['usable_cores']} cores", *([f"{size / 2**30:.0f} GiB"] if size else [])]
        machine = ", ".join(words)
    return {
        "model": model.get("name", ""),
        "machine": machine,
        "level": None if simulated or on_gpu else cpu.get("level"),
        "date": environment["date"],
        "environment": {name: environment[name] for name in _ENVIRONMENT if name in environment},
    }


def digest(inputs: Any) -> str:
    """Return a digest of plain values."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]


def records_file(claim_file: Path) -> Path:
    return claim_file.parent / RECORDS / f"{claim_file.stem}.json"


def read_summaries(claim_file: Path) -> list[Summary]:
    """Read the summaries of the claim in `claim_file`; none if nothing was measured. WorkbenchError for another
    file."""
    file = records_file(claim_file)
    if not file.is_file():
        return []
    try:
        return [_summary(values) for values in read_json_file(file)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkbenchError(f"{file}: is no list of summaries ({error}); delete it and measure again") from None


def _summary(values: dict[str, Any]) -> Summary:
    laws = values.pop("laws", {})
    return Summary(**values, laws=LawCount(laws.get("tried", 0), tuple(laws.get("broken", ()))))


def store_summaries(claim_file: Path, fresh: Iterable[Summary]) -> Path:
    """Add summaries to those of a claim, in place of those that they replace. A calculation that comes out as before
    keeps its line."""
    kept = read_summaries(claim_file)
    for new in fresh:
        if any(
            old.machine == new.machine and _alike(old, new) for old in kept if not old.model and old.trial == new.trial
        ):
            continue
        kept = [*(old for old in kept if not new.replaces(old)), new]
    lines = [json.dumps(_short(each), ensure_ascii=False, allow_nan=False) for each in kept]
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    file = records_file(claim_file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda out: out.write(text.encode()))
    except OSError as error:
        raise cannot_write(str(file), error) from None
    return file


def _alike(old: Summary, new: Summary) -> bool:
    return old.trial == "calculation" and (old.figures, old.inputs) == (new.figures, new.inputs)


def _short(summary: Summary) -> dict[str, Any]:
    from workbench.runs.folder import finite_json

    values = finite_json(asdict(summary))
    assert isinstance(values, dict)
    if not summary.laws.tried:
        del values["laws"]
    needed = ("trial", "figures")
    return {name: value for name, value in values.items() if name in needed or value not in (None, "", {}, [])}
