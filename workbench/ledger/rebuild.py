"""Rebuild the ledger: repeat calculations, read records, and judge both again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from workbench.ledger.claim import Calculation, Claim, Measurement, Missing, Run, Trial, Unbuilt, judged
from workbench.ledger.entry import Entry, Ledger
from workbench.ledger.kept import Kept, all_kept, name_of


class Records:
    """The records of a folder, each read once. `experiments` is the folder of the experiments' files."""

    def __init__(self, folder: Path, experiments: Path) -> None:
        self.folder, self.experiments = folder, experiments
        self._known: dict[str, tuple[Kept, ...]] = {}

    def of(self, evidence: Run | Measurement) -> Kept | None:
        """Return the record that decides, None where there is none."""
        return next(iter(self.all(evidence)), None)

    def all(self, evidence: Run | Measurement) -> tuple[Kept, ...]:
        """Return every record of the evidence from all machines, the one that decides first."""
        name = name_of(evidence)
        if name not in self._known:
            self._known[name] = all_kept(name, self.folder, not isinstance(evidence, Measurement) or evidence.timed)
        return self._known[name]

    def file(self, evidence: Run) -> Path:
        return self.experiments / f"{evidence.name}.yaml"


def entry_of(claim: Claim, trial: Trial, records: Records) -> Entry:
    """Judge a trial by its calculation or by its deciding record; without a record the entry has no verdict.

    A record that the rule cannot read gives no verdict either, and a remark says so; other claims are unaffected.
    """
    evidence = trial.evidence
    empty = Entry(trial.told, changed=trial.changed, no_test=trial.illustrates)
    if isinstance(evidence, Missing):
        return replace(empty, outcome="not-testable-here", because=f"needs {evidence.needs}")
    if isinstance(evidence, Unbuilt):
        return replace(empty, because=f"not built: {evidence.what}")
    if isinstance(evidence, Calculation):
        verdict = judged(claim, trial, evidence.numbers())
        return replace(empty, machine=evidence.machine, date=_today()).with_verdict(verdict)
    record = records.of(evidence)
    return empty if record is None else entry_from(claim, trial, record, records)


def entry_from(claim: Claim, trial: Trial, record: Kept, records: Records) -> Entry:
    """Judge a trial by one record of its evidence."""
    file = records.file(trial.evidence) if isinstance(trial.evidence, Run) else Path()
    remark = record.remark(file)
    entry = Entry(
        trial.told, machine=record.machine, date=record.date, record=record.name, busy=record.busy, remark=remark,
        level=record.level, changed=trial.changed, no_test=trial.illustrates,
    )  # fmt: skip
    try:
        return entry.with_verdict(judged(claim, trial, record.numbers))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        fault = f"its rule cannot read this record ({type(error).__name__}: {error})"
        return replace(entry, remark="; ".join(filter(None, [remark, fault])))


def rebuilt(claims: Mapping[str, Claim], records: Records, before: Ledger) -> Ledger:
    """Rebuild the ledger of `claims`. A calculation with an unchanged result has its old date."""
    ledger: Ledger = {}
    for id, claim in claims.items():
        entries = [entry_of(claim, trial, records) for trial in claim.trials]
        ledger[id] = tuple(_dated(entry, before.get(id, ())) for entry in entries)
    return ledger


def _dated(entry: Entry, known: tuple[Entry, ...]) -> Entry:
    same = (old for old in known if replace(old, date=entry.date) == entry)
    return next(same, entry)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
