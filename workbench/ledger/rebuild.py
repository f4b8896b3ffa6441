"""Rebuild the ledger: repeat calculations, read records, and judge both again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from workbench.ledger.claim import CalculationEvidence, Claim, MeasurementEvidence, MissingEvidence, RunEvidence, ClaimTrial, UnbuiltEvidence, apply_rule
from workbench.ledger.entry import LedgerEntry, Ledger
from workbench.ledger.kept import StoredRecord, stored_records, record_name


class RecordFolder:
    """The records of a folder, each read once. `experiments` is the folder of the experiments' files."""

    def __init__(self, folder: Path, experiments: Path) -> None:
        self.folder, self.experiments = folder, experiments
        self._known: dict[str, tuple[StoredRecord, ...]] = {}

    def latest(self, evidence: RunEvidence | MeasurementEvidence) -> StoredRecord | None:
        """Return the record that decides, None where there is none."""
        return next(iter(self.all(evidence)), None)

    def all(self, evidence: RunEvidence | MeasurementEvidence) -> tuple[StoredRecord, ...]:
        """Return every record of the evidence from all machines, the one that decides first."""
        name = record_name(evidence)
        if name not in self._known:
            self._known[name] = stored_records(name, self.folder, not isinstance(evidence, MeasurementEvidence) or evidence.timed)
        return self._known[name]

    def experiment_file(self, evidence: RunEvidence) -> Path:
        return self.experiments / f"{evidence.name}.yaml"


def judge_trial(claim: Claim, trial: ClaimTrial, records: RecordFolder) -> LedgerEntry:
    """Judge a trial by its calculation or by its deciding record; without a record the entry has no verdict.

    A record that the rule cannot read gives no verdict either, and a remark says so; other claims are unaffected.
    """
    evidence = trial.evidence
    empty = LedgerEntry(trial.evidence_label, changed=trial.changed, no_test=trial.no_test_reason)
    if isinstance(evidence, MissingEvidence):
        return replace(empty, outcome="not-testable-here", reason=f"needs {evidence.needs}")
    if isinstance(evidence, UnbuiltEvidence):
        return replace(empty, reason=f"not built: {evidence.what}")
    if isinstance(evidence, CalculationEvidence):
        verdict = apply_rule(claim, trial, evidence.numbers())
        return replace(empty, machine=evidence.machine, date=_today()).with_verdict(verdict)
    record = records.latest(evidence)
    return empty if record is None else judge_record(claim, trial, record, records)


def judge_record(claim: Claim, trial: ClaimTrial, record: StoredRecord, records: RecordFolder) -> LedgerEntry:
    """Judge a trial by one record of its evidence."""
    file = records.experiment_file(trial.evidence) if isinstance(trial.evidence, RunEvidence) else Path()
    remark = record.remark(file)
    entry = LedgerEntry(
        trial.evidence_label, machine=record.machine, date=record.date, record=record.name, contention=record.contention, remark=remark,
        level=record.instruction_set, changed=trial.changed, no_test=trial.no_test_reason,
    )  # fmt: skip
    try:
        return entry.with_verdict(apply_rule(claim, trial, record.numbers))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        fault = f"its rule cannot read this record ({type(error).__name__}: {error})"
        return replace(entry, remark="; ".join(filter(None, [remark, fault])))


def rebuild_ledger(claims: Mapping[str, Claim], records: RecordFolder, previous: Ledger) -> Ledger:
    """Rebuild the ledger of `claims`. A calculation with an unchanged result has its old date."""
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
