"""Read, write and rebuild the ledger of claims, from calculations and stored records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.claims.claim import (
    CalculationEvidence,
    Claim,
    ClaimTrial,
    MeasurementEvidence,
    MissingEvidence,
    RunEvidence,
    UnbuiltEvidence,
    apply_rule,
)
from workbench.claims.stored_record import StoredRecord, record_name, stored_records
from workbench.custom import user_code
from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError
from workbench.experiment.verdict import Outcome, RuleChange, Verdict
from workbench.files import read_json_file, write_atomically
from workbench.runs.folder import finite_json
from workbench.units import format_percent

NOT_RUN = "not run yet"
NO_TEST = "no test"  # shown for a rule that cannot fail
LEDGER_FILE = "ledger.json"


@dataclass(frozen=True)
class LedgerEntry(Displayable):
    """The verdict of one trial.

    Attributes:
        outcome: None if the evidence was not run yet, or the rule cannot fail (`no_test` has the reason).
        contention: share of the processor that other processes had during the measurement.
        remark: warnings about the record.
        level: the processor's instruction set (`workbench.machine.processor.LEVELS`).
        changed: changes of the rule after a look at results.
    """

    evidence: str
    outcome: Outcome | None = None
    reason: str = ""
    limits: str = ""
    rule: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)
    machine: str = ""
    date: str | None = None
    record: str | None = None
    contention: float | None = None
    remark: str = ""
    level: str | None = None
    changed: tuple[RuleChange, ...] = ()
    no_test: str = ""

    @property
    def outcome_label(self) -> str:
        return NO_TEST if self.no_test else self.outcome or NOT_RUN

    def _display_table(self) -> Table:
        values = asdict(self) | {
            "contention": self.contention and f"{format_percent(self.contention)} of the processor used by others"
        }
        hidden = ("outcome", "figures", "changed")
        rows = [(name, value) for name, value in values.items() if name not in hidden and value]
        rows += [("rule changed", str(change)) for change in self.changed]
        rows += [(f"our {name}", value) for name, value in self.figures.items()]
        return Table(self.outcome_label, rows)

    def with_verdict(self, verdict: Verdict) -> LedgerEntry:
        figures = finite_json(dict(verdict.figures))
        assert isinstance(figures, dict)
        limits = verdict.limits if verdict.outcome == "holds-with-limits" else ""
        found = {"outcome": verdict.outcome, "reason": verdict.reason, "limits": limits, "rule": verdict.rule}
        return replace(self, **found, figures=figures, changed=(*self.changed, *verdict.changed))


Ledger = dict[str, tuple[LedgerEntry, ...]]  # by claim id, one entry per trial


def read_ledger(file: Path) -> Ledger:
    """Read the ledger in `file`; empty if the file does not exist."""
    if not file.exists():
        return {}
    try:
        claims = read_json_file(file)["claims"]
        return {id: tuple(map(_entry, entries)) for id, entries in claims.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkbenchError(
            f"{file}: is no ledger ({error}); `workbench claims run --from-records` writes it anew"
        ) from None


def write_ledger(ledger: Mapping[str, Sequence[LedgerEntry]], file: Path) -> None:
    """Write the whole ledger file, which is never edited by hand."""
    claims: dict[str, Any] = {id: [_short(entry) for entry in entries] for id, entries in ledger.items()}
    value = {"written by": "workbench claims run", "claims": claims}
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write_atomically(file, lambda out: out.write(text.encode()))
    except OSError as error:
        raise WorkbenchError(f"{file}: the ledger cannot be written there ({error})") from error


def _entry(values: dict[str, Any]) -> LedgerEntry:
    changed = tuple(RuleChange(**change) for change in values.get("changed", ()))
    return replace(LedgerEntry(**{name: value for name, value in values.items() if name != "changed"}), changed=changed)


def _short(entry: LedgerEntry) -> dict[str, Any]:
    return {name: value for name, value in asdict(entry).items() if value not in (None, "", {}, ())}


class RecordFolder:
    """The records of a folder, each read once. `experiments` is the folder of experiment files."""

    def __init__(self, folder: Path, experiments: Path) -> None:
        self.folder, self.experiments = folder, experiments
        self._known: dict[str, tuple[StoredRecord, ...]] = {}

    def latest(self, evidence: RunEvidence | MeasurementEvidence) -> StoredRecord | None:
        """Return the deciding record; None without records."""
        return next(iter(self.all(evidence)), None)

    def all(self, evidence: RunEvidence | MeasurementEvidence) -> tuple[StoredRecord, ...]:
        """Return all records of the evidence from all machines, the deciding record first."""
        name = record_name(evidence)
        if name not in self._known:
            self._known[name] = stored_records(
                name, self.folder, not isinstance(evidence, MeasurementEvidence) or evidence.timed
            )
        return self._known[name]

    def experiment_file(self, evidence: RunEvidence) -> Path:
        return self.experiments / f"{evidence.name}.yaml"


def judge_trial(claim: Claim, trial: ClaimTrial, records: RecordFolder) -> LedgerEntry:
    """Judge a trial by its calculation or by its deciding record; without a record the entry has no verdict.

    A record that the rule cannot read gives no verdict but a remark; other claims are unaffected.
    """
    evidence = trial.evidence
    empty = LedgerEntry(trial.evidence_label, changed=trial.changed, no_test=trial.no_test_reason)
    if isinstance(evidence, MissingEvidence):
        return replace(empty, outcome="not-testable-here", reason=f"needs {evidence.needs}")
    if isinstance(evidence, UnbuiltEvidence):
        return replace(empty, reason=f"not built: {evidence.what}")
    if isinstance(evidence, CalculationEvidence):
        with user_code(f"claim {claim.id}: its calculation must return numbers"):
            numbers = evidence.numbers()
        verdict = apply_rule(claim, trial, numbers)
        return replace(empty, machine=evidence.machine, date=_today()).with_verdict(verdict)
    record = records.latest(evidence)
    return empty if record is None else judge_record(claim, trial, record, records)


def judge_record(claim: Claim, trial: ClaimTrial, record: StoredRecord, records: RecordFolder) -> LedgerEntry:
    """Judge a trial by one record of its evidence."""
    file = records.experiment_file(trial.evidence) if isinstance(trial.evidence, RunEvidence) else Path()
    remark = record.remark(file)
    entry = LedgerEntry(
        trial.evidence_label, machine=record.machine, date=record.date, record=record.name,
        contention=record.contention, remark=remark,
        level=record.instruction_set, changed=trial.changed, no_test=trial.no_test_reason,
    )  # fmt: skip
    try:
        return entry.with_verdict(apply_rule(claim, trial, record.numbers))
    except WorkbenchError as error:
        return replace(entry, remark="; ".join(filter(None, [remark, f"no verdict on this record: {error}"])))


def rebuild_ledger(claims: Mapping[str, Claim], records: RecordFolder, previous: Ledger) -> Ledger:
    """Rebuild the ledger of `claims`. A calculation with an unchanged result keeps its old date."""
    ledger: Ledger = {}
    for id, claim in claims.items():
        entries = [judge_trial(claim, trial, records) for trial in claim.trials]
        ledger[id] = tuple(_dated(entry, previous.get(id, ())) for entry in entries)
    return ledger


def _dated(entry: LedgerEntry, known: tuple[LedgerEntry, ...]) -> LedgerEntry:
    same = (old for old in known if replace(old, date=entry.date) == entry)
    return next(same, entry)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
