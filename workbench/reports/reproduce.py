"""Run a record's experiment again, and report the differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import AgentWorkload
from workbench.machine.processor import is_contended
from workbench.measure.run import run
from workbench.reports import differences
from workbench.reports.differences import (
    HARDWARE_ENTRIES,
    RUNTIME_ENTRIES,
    VERSION_ENTRIES,
    Difference,
    TokenDifference,
)
from workbench.reports.latency_check import LatencyCheck, check_latencies
from workbench.reports.logit_check import LogitCheck, check_logits
from workbench.runs.condition import MANIFEST, MARKER
from workbench.runs.record import Record

COMPARED_FIELDS = ("settings", "versions", "hardware", "running")
POINT, SWEEP = "point.json", "sweep.yaml"  # as in sweep.point and sweep.folder
RECORDED_FOLDER_FILES = (MARKER, MANIFEST, POINT)  # any of these marks a run's or a point's folder
DEFAULT_LOGIT_CHECKS = 2  # requests whose logits are checked by default


@dataclass(frozen=True)
class Reproduction(Displayable):
    """A run and its repetition.

    `tokens` has each request whose token ids differ, with the first position; `steps` counts steps formed as recorded,
    None where this was no replay; `remarks` has warnings for the reader; `changes` are settings given anew.
    """

    before: Record
    repeated: Record
    requests: int
    tokens: tuple[TokenDifference, ...] = ()
    settings: tuple[Difference, ...] = ()
    versions: tuple[Difference, ...] = ()
    hardware: tuple[Difference, ...] = ()
    running: tuple[Difference, ...] = ()
    logits: tuple[LogitCheck, ...] = ()
    timings: tuple[LatencyCheck, ...] = ()
    steps: int | None = None
    same_reasons: bool = False
    remarks: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        return not self.tokens

    @property
    def equal_within_bound(self) -> bool:
        """Return whether rounding explains all that differs, in the requests that were checked: logits, what was
        recorded of them, and the tokens where the runs part."""
        return bool(self.logits) and all(
            each.within_bound and each.explained_by_rounding is not False for each in self.logits
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _display_table(self) -> Table:
        first, *others = self._lines()
        return Table(first, [(line,) for line in others], ("beside the record",))

    def _lines(self) -> Iterator[str]:
        if self.identical:
            yield f"identical tokens in all {self.requests} requests"
        else:
            yield f"tokens differ in {len(self.tokens)} of {self.requests} requests"
            yield from map(str, self.tokens)
        if self.changes:
            verdict = "equal within the bound of rounding" if self.equal_within_bound else "NOT shown to be equal"
            yield f"against    {', '.join(self.changes)}: {verdict}, {len(self.logits)} requests checked"
        if self.steps is not None:
            words = "down to the reason of every decision" if self.same_reasons else "some decisions with other reasons"
            yield f"replayed   {self.steps} steps, formed as they were recorded, {words}"
        for name in COMPARED_FIELDS:
            found = getattr(self, name)
            yield from _listed(name, found) if found else (f"{name:10} the same",)
        yield from _listed("logits", self.logits)
        yield from _listed("timings", self.timings)
        yield from self.remarks

    def as_dict(self) -> dict[str, Any]:
        named = {name: [asdict(each) for each in getattr(self, name)] for name in COMPARED_FIELDS}
        replayed = None if self.steps is None else {"steps": self.steps, "same_reasons": self.same_reasons}
        return {
            "identical": self.identical,
            "changes": list(self.changes),
            "equal_within_bound": self.equal_within_bound,
            "requests": self.requests,
            "tokens": [{**asdict(each), "text": str(each)} for each in self.tokens],
            **named,
            "logits": [each.as_dict() for each in self.logits],
            "timings": [{**asdict(each), "inside": each.within_spread} for each in self.timings],
            "replayed": replayed,
            "remarks": list(self.remarks),
            "record": str(self.before.path),
            "run": str(self.repeated.path),
        }


def _listed(name: str, found: tuple[object, ...]) -> Iterator[str]:
    for number, each in enumerate(found):
        yield f"{'' if number else name:10} {each}"


def reproduce(
    record: Record | Path | str,
    out: Path | str | None = None,
    progress: bool = True,
    replay: bool = False,
    logit_checks: int = DEFAULT_LOGIT_CHECKS,
    changes: Sequence[str] = (),
) -> Reproduction:
    """Run the experiment of `record` again, and compare both runs.

        print(workbench.reproduce(record, replay=True))

    Args:
        record: a record, or the path of a run folder.
        out: folder for the new run; beside the recorded one unless given.
        progress: show progress on the terminal.
        replay: form every step as it was recorded, whatever the clock says.
        logit_checks: how many requests' logits are checked against exact ones.
        changes: settings to change, as `parallel.tensor=1`: whether the run is equal, within rounding, without them.

    Raises:
        WorkbenchError: before any work, the record is damaged, changed, or no run of requests; later, a replay leaves
            the record (engine.replay.Diverged).
    """
    record = record if isinstance(record, Record) else Record.open(record)
    record.verify()
    experiment = Experiment.from_yaml(record.experiment_text, where=f"{record.path}/experiment.yaml").with_(*changes)
    if experiment.is_comparison and not isinstance(experiment.workload, AgentWorkload):
        raise WorkbenchError(
            f"{record.path}: a table of variants, not one run of requests; "
            "`workbench run` of its experiment.yaml makes it anew"
        )
    script = record.script() if replay else None
    again = run(experiment, _outside(record.path, out), "reproduce", progress, script)
    return replace(compare_repetition(record, again, experiment, logit_checks), changes=tuple(changes))


def _outside(path: Path, out: Path | str | None) -> Path:
    """Return the folder for the new run: `out`, or the folder beside the recorded one.

    The recorded folder is the run's or, for a point of a sweep, the whole sweep's: neither is written into.
    WorkbenchError where `out` lies within it.
    """
    recorded = path.resolve()
    while (wider := _enclosing_folder(recorded)) is not None:
        recorded = wider
    if out is None:
        return recorded.parent
    if Path(out).resolve().is_relative_to(recorded):
        raise WorkbenchError(
            f"{out}: lies within {recorded}, which is reproduced and stays as it is; name a folder beside it, such as "
            f"{recorded.parent}"
        )
    return Path(out)


def _enclosing_folder(path: Path) -> Path | None:
    """Return the run, point or sweep that contains the folder `path`, or None."""
    if (path / POINT).exists():  # below `points` of its sweep
        sweep = path.parent.parent
        return sweep if (sweep / SWEEP).exists() else None
    return next(
        (parent for parent in path.parents[:3] if any((parent / name).exists() for name in RECORDED_FOLDER_FILES)), None
    )


def compare_repetition(
    before: Record, after: Record, experiment: Experiment, logit_checks: int = DEFAULT_LOGIT_CHECKS
) -> Reproduction:
    """Compare two runs of `experiment`."""
    tokens, remarks = differences.output_differences(before, after), list[str]()
    steps = after.summary.get("replayed_steps")
    found: tuple[LogitCheck, ...] = ()
    if logit_checks and "simulated" not in after.summary:
        try:
            found = check_logits(before, experiment, tokens, logit_checks)
        except WorkbenchError as error:
            remarks.append(f"logits were not checked: {error}")
    for name, record in (("the recorded run", before), ("this one", after)):
        busy = record.summary.get("others_cpu_share")
        if is_contended(busy):
            remarks.append(f"while {name} ran, other processes took {busy:.0%} of the processor: mind the timings")
    return Reproduction(
        before,
        after,
        len(differences.outputs_of(before)),
        tokens,
        differences.setting_differences(before, experiment),
        differences.environment_differences(before, after, VERSION_ENTRIES),
        differences.environment_differences(before, after, HARDWARE_ENTRIES),
        differences.environment_differences(before, after, RUNTIME_ENTRIES),
        found,
        check_latencies(before, after),
        steps,
        steps is not None and after.script().same_as(before.script()),
        tuple(remarks),
    )
