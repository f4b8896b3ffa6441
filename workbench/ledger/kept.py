"""Records that stay: runs and measurements as dated files in one folder, and what claims read in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import read_json_file, read_yaml
from workbench.ledger.claim import Measurement, Numbers, Run
from workbench.ledger.machines import machine_of
from workbench.study.dated_record import write_dated
from workbench.study.environment import environment
from workbench.study.experiment import Experiment
from workbench.study.machine import cpu_times, others_cpu_share
from workbench.study.record import Record

BUSY = 0.1  # share of the processor that others took above which times are not to be trusted


class Kept:
    """A record that was kept: `numbers` are what rules read, the run's rows or a measurement's values."""

    def __init__(self, file: Path, value: Mapping[str, Any]) -> None:
        self.name, self.value = file.name, value
        self.environment = value["environment"]
        self.date: str = value["environment"]["date"]
        self.experiment: dict[str, Any] | None = value.get("experiment")
        self.numbers: Numbers = value["numbers"] if "numbers" in value else value["summary"]["rows"]
        self.busy: float | None = value.get("summary", value).get("others_cpu_share")
        self.verdicts: list[dict[str, Any]] = value.get("summary", {}).get("verdicts", [])

    @property
    def machine(self) -> str:
        return machine_of(self.environment, self.experiment)

    def remark(self, file: Path) -> str:
        """What is to be known before it is believed: others at work, or an experiment that has changed since."""
        told = []
        timed = self.experiment is None or self.experiment.get("executor", {}).get("kind") != "simulated"
        if timed and self.busy is not None and self.busy > BUSY:
            told.append(f"other processes took {self.busy:.0%} of the processor")
        if self.changed(file):
            told.append("the experiment has been changed since")
        return "; ".join(told)

    def changed(self, file: Path) -> bool:
        """Whether the experiment in `file` is another one by now."""
        return self.experiment is not None and file.is_file() and not _same(self.experiment, file)


def kept(name: str, folder: Path) -> Kept | None:
    """The newest record called `name` in `folder`, None where there is none. Raises WorkbenchError for one that
    cannot be read."""
    pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}\.json")
    files = sorted(file for file in folder.glob(f"{name}-*.json") if pattern.fullmatch(file.name))
    if not files:
        return None
    try:
        return Kept(files[-1], read_json_file(files[-1]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkbenchError(
            f"{files[-1]}: is no record of rows or numbers ({type(error).__name__}: {error})"
        ) from None


def name_of(evidence: Run | Measurement) -> str:
    return evidence.name if isinstance(evidence, Run) else f"claims_{evidence.name}"


def keep_run(record: Record, name: str, folder: Path) -> Path:
    """A run's experiment, environment and summary as one dated file."""
    return write_dated(
        {
            "date": record.environment["date"],
            "summary": record.summary,
            "environment": record.environment,
            "experiment": read_yaml(record.experiment_text, f"run {record.path}: experiment.yaml"),
        },
        folder,
        name,
    )


def measured(evidence: Measurement, quick: bool) -> dict[str, Any]:
    """The numbers of a measurement made now, as its record has them."""
    surroundings = environment()
    before = cpu_times()
    numbers = evidence.numbers(quick)
    busy = others_cpu_share(before)
    return {"date": surroundings["date"], "numbers": numbers, "others_cpu_share": busy, "environment": surroundings}


def _same(recorded: Mapping[str, Any], file: Path) -> bool:
    """Whether a file still says what was run, but for its question and what judges it; settings that are younger than
    the record have their defaults."""
    left_out = {"question", "judge"}
    try:
        then = Experiment.of({**recorded}, "record")
    except WorkbenchError:
        return False  # it had settings that are no more
    return then.model_dump(exclude=left_out) == Experiment.read(file).model_dump(exclude=left_out)
