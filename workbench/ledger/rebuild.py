"""The ledger from what is there: calculations are made again, records are read and judged again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from workbench.ledger.claim import Calculation, Claim, Measurement, Missing, Run, Trial, judged
from workbench.ledger.entry import Entry, Ledger
from workbench.ledger.kept import Kept, kept, name_of


class Records:
    """The newest records of a folder, each read once. `experiments` is the folder of the experiments' files."""

    def __init__(self, folder: Path, experiments: Path) -> None:
        self.folder, self.experiments = folder, experiments
        self._known: dict[str, Kept | None] = {}

    def of(self, evidence: Run | Measurement) -> Kept | None:
        name = name_of(evidence)
        if name not in self._known:
            self._known[name] = kept(name, self.folder)
        return self._known[name]

    def file(self, evidence: Run) -> Path:
        return self.experiments / f"{evidence.name}.yaml"


def entry_of(claim: Claim, trial: Trial, records: Records) -> Entry:
    """A trial's verdict from its calculation or from the newest record of its run; without one, none. A record that the
    rule cannot read gives none either, and says so: it keeps no other claim from its verdict."""
    evidence, told = trial.evidence, trial.told
    if isinstance(evidence, Missing):
        return Entry(told, "not-testable-here", f"needs {evidence.needs}")
    if isinstance(evidence, Calculation):
        verdict = judged(claim, trial, evidence.numbers())
        return Entry(told, machine=evidence.machine, date=_today()).with_verdict(verdict)
    record = records.of(evidence)
    if record is None:
        return Entry(told)
    remark = record.remark(records.file(evidence)) if isinstance(evidence, Run) else record.remark(Path())
    entry = Entry(told, machine=record.machine, date=record.date, record=record.name, busy=record.busy, remark=remark)
    try:
        return entry.with_verdict(judged(claim, trial, record.numbers))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        fault = f"its rule cannot read this record ({type(error).__name__}: {error})"
        return replace(entry, remark="; ".join(filter(None, [remark, fault])))


def rebuilt(claims: Mapping[str, Claim], records: Records, before: Ledger) -> Ledger:
    """The ledger of `claims`. A calculation that came out as before keeps its date."""
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
