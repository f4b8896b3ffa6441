"""Run a record's experiment again, and report the differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.machine.processor import contention_remark
from workbench.measure.run import run
from workbench.reports import differences
from workbench.reports.differences import (
    AGENT_ROUNDS,
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
RECORDED_FOLDER_FILES = (MARKER, MANIFEST, POINT)  # files that mark the folder of a run or of a point
DEFAULT_LOGIT_CHECKS = 2  # default number of requests whose logits are checked


@dataclass(frozen=True)
class Reproduction(Displayable):
    """A run and its repetition.

    `tokens` has each request with different token ids and their first differing position. `steps` is the number of
    steps formed as recorded, None if this was not a replay. `remarks` are warnings to the reader. `changes` are the
    settings changed for the repetition.
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
        """Return whether rounding explains all differences of the requests that were checked: logits, recorded logits
        and log-probabilities, and the tokens at which the runs diverge."""
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
            yield f"identical tokens in all requests ({self.requests})"
        else:
            yield f"tokens differ in {len(self.tokens)} of {self.requests} requests"
            yield from map(str, self.tokens)
        if self.changes:
            verdict = "equal within the bound of rounding" if self.equal_within_bound else "NOT shown to be equal"
            yield f"against    {', '.join(self.changes)}: {verdict}, {len(self.logits)} requests checked"
        if self.steps is not None:
            words = "with the same reasons of decisions" if self.same_reasons else "some decisions with other reasons"
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
        out: folder for the new run; None is the folder that contains the recorded run.
        progress: show progress on the terminal.
        replay: form every step as it was recorded, whatever the clock says.
        logit_checks: number of requests whose logits are checked against exact ones.
        changes: settings to change, such as `parallel.tensor=1`, to see whether the outputs stay equal within rounding.

    Raises:
        WorkbenchError: before the run, if the record is damaged, was changed, or is no run of requests; during it, if a
            replay cannot follow the record (engine.replay.Diverged).
    """
    record = record if isinstance(record, Record) else Record.open(record)
    record.verify()
    experiment = Experiment.from_yaml(record.experiment_text, where=f"{record.path}/experiment.yaml").with_(*changes)
    if experiment.is_comparison and AGENT_ROUNDS not in record.manifest:
        raise WorkbenchError(
            f"{record.path}: a table of variants, not one run of requests; "
            "`workbench run` of its experiment.yaml makes it anew"
        )
    script = record.script() if replay else None
    again = run(experiment, _outside(record.path, out), "reproduce", progress, script)
    return replace(compare_repetition(record, again, experiment, logit_checks), changes=tuple(changes))


def _outside(path: Path, out: Path | str | None) -> Path:
    """Return the folder for the new run: `out`, or the folder that contains the recorded run.

    The recorded folder is the run's own folder or, for a point of a sweep, the folder of the whole sweep. Nothing is
    written into it. Raises WorkbenchError if `out` lies within it.
    """
    recorded = path.resolve()
    while (wider := _enclosing_folder(recorded)) is not None:
        recorded = wider
    if out is None:
        return recorded.parent
    if Path(out).resolve().is_relative_to(recorded):
        raise WorkbenchError(
            f"{out}: lies within {recorded}, which must not change; choose a folder outside it, such as "
            f"{recorded.parent}"
        )
    return Path(out)


def _enclosing_folder(path: Path) -> Path | None:
    """Return the folder of the run, point or sweep that contains `path`, or None."""
    if (path / POINT).exists():  # points lie in the folder `points` of their sweep
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
        if remark := contention_remark(record.summary.get("others_cpu_share")):
            remarks.append(f"while {name} ran, {remark}")
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
