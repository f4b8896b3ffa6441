"""Store runs and measurements as dated files in one folder, and read them for claims."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.claims.claim import EvidenceNumbers, MeasurementEvidence, RunEvidence
from workbench.custom import user_code
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.files import read_json_file, read_yaml
from workbench.machine.environment import environment
from workbench.machine.processor import MAX_CONTENTION, cpu_times, others_cpu_share, simd_level_of
from workbench.runs.folder import finite_json, write_dated_record
from workbench.runs.record import Record
from workbench.units import format_percent


def describe_machine(environment: Mapping[str, Any], experiment: Mapping[str, Any] | None = None) -> str:
    """Describe the machine of a record: processor, cores and memory, or the GPU of the model, or the simulated
    hardware.
    """
    if simulated := _simulated(experiment or {}):
        return simulated
    device = (experiment or {}).get("model", {}).get("device", "cpu")
    if device != "cpu" and environment.get("gpu"):
        return ", ".join(environment["gpu"])
    cpu, size = environment["cpu"], environment.get("memory_bytes")
    words = [cpu["model"], f"{cpu['usable_cores']} cores"]
    return ", ".join(words + ([f"{size / 2**30:.0f} GiB"] if size else []))


def _simulated(experiment: Mapping[str, Any]) -> str:
    executor = experiment.get("executor") or {}
    if executor.get("kind") != "simulated":
        return ""
    count = executor.get("instances", 1) * executor.get("gpus", 1)
    hardware = executor["hardware"]
    name = hardware if isinstance(hardware, str) else hardware.get("name", "given hardware")
    return f"simulated: {count} x {name}"


class StoredRecord:
    """A stored record: `numbers` are a rule's input, the run's rows or a measurement's values."""

    def __init__(self, file: Path, value: Mapping[str, Any]) -> None:
        self.name, self.value = file.name, value
        self.environment = value["environment"]
        self.date: str = value["environment"]["date"]
        self.experiment: dict[str, Any] | None = value.get("experiment")
        self.numbers: EvidenceNumbers = value["numbers"] if "numbers" in value else value["summary"]["rows"]
        self.contention: float | None = value.get("summary", value).get("others_cpu_share")
        self.verdicts: list[dict[str, Any]] = value.get("summary", {}).get("verdicts", [])

    @property
    def machine(self) -> str:
        return describe_machine(self.environment, self.experiment)

    @property
    def instruction_set(self) -> str | None:
        """Return the processor's instruction set, derived from the CPU flags if the record does not name it.

        None if time was simulated, or the model was on another device.
        """
        if self.simulated or (self.experiment or {}).get("model", {}).get("device", "cpu") != "cpu":
            return None
        cpu = self.environment["cpu"]
        return cpu["level"] if "level" in cpu else simd_level_of(cpu.get("flags", ()))

    @property
    def simulated(self) -> bool:
        return ((self.experiment or {}).get("executor") or {}).get("kind") == "simulated"

    @property
    def is_noisy(self) -> bool:
        """Return whether contention makes its times unreliable."""
        return not self.simulated and self.contention is not None and self.contention > MAX_CONTENTION

    def remark(self, file: Path) -> str:
        """Return warnings about the record: contention, or an experiment that has changed since."""
        remarks = []
        if self.is_noisy:
            remarks.append(f"other processes took {format_percent(self.contention)} of the processor")
        if self.experiment_changed(file):
            remarks.append("the experiment has been changed since")
        return "; ".join(remarks)

    def experiment_changed(self, file: Path) -> bool:
        """Return whether the experiment in `file` has changed since."""
        return self.experiment is not None and file.is_file() and not _same_experiment(self.experiment, file)


def stored_records(name: str, folder: Path, timed: bool = True) -> tuple[StoredRecord, ...]:
    """Return the records called `name` in `folder`: the deciding record, then the others from the newest on.

    If times matter (`timed`), the newest record without contention decides. WorkbenchError for an unreadable record.
    """
    pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}\.json")
    files = sorted(file for file in folder.glob(f"{name}-*.json") if pattern.fullmatch(file.name))
    newest_first = [_read(file) for file in reversed(files)]
    return tuple(sorted(newest_first, key=lambda record: timed and record.is_noisy))


def _read(file: Path) -> StoredRecord:
    try:
        return StoredRecord(file, read_json_file(file))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkbenchError(f"{file}: is no record of rows or numbers ({type(error).__name__}: {error})") from None


def record_name(evidence: RunEvidence | MeasurementEvidence) -> str:
    return evidence.name if isinstance(evidence, RunEvidence) else f"claims_{evidence.name}"


def store_run(record: Record, name: str, folder: Path) -> Path:
    """Store a run's experiment, environment and summary as one dated file."""
    return write_dated_record(
        {
            "date": record.environment["date"],
            "summary": record.summary,
            "environment": record.environment,
            "experiment": read_yaml(record.experiment_text, f"run {record.path}: experiment.yaml"),
        },
        folder,
        name,
    )


def run_measurement(evidence: MeasurementEvidence, quick: bool) -> dict[str, Any]:
    """Measure now, and return the numbers in the form stored in a record."""
    current_environment = environment()
    before = cpu_times()
    with user_code("its function must return dicts, lists, numbers and texts"):
        numbers = evidence.numbers(quick)
        json.dumps(finite_json(numbers))  # as its record is stored
    contention = others_cpu_share(before)
    return {
        "date": current_environment["date"],
        "numbers": numbers,
        "others_cpu_share": contention,
        "environment": current_environment,
    }


def _same_experiment(recorded: Mapping[str, Any], file: Path) -> bool:
    """Return whether a file still has the recorded experiment, ignoring its question and judge.

    Settings newer than the record must have their defaults.
    """
    left_out = {"question", "judge"}
    try:
        then = Experiment.from_record(recorded, "record")
    except WorkbenchError:
        return False  # the record has settings that no longer exist
    return then.model_dump(exclude=left_out) == Experiment.from_file(file).model_dump(exclude=left_out)
