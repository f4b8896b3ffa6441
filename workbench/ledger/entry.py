"""An entry of the ledger, and the ledger as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import read_json_file
from workbench.shown import Displayable, Table
from workbench.study.run_folder import finite_json, write_atomically
from workbench.study.verdict import Outcome, RuleChange, Verdict

NOT_RUN = "not run yet"
NO_TEST = "no test"  # shown for a rule that cannot fail
LEDGER_FILE = "ledger.json"


@dataclass(frozen=True)
class LedgerEntry(Displayable):
    """The verdict of one trial.

    Attributes:
        outcome: None where the evidence was not run yet, or the rule cannot fail (`no_test` has the reason).
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
        values = asdict(self) | {"contention": None if self.contention is None else f"{self.contention:.0%} of the processor had others"}
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


Ledger = dict[str, tuple[LedgerEntry, ...]]  # by the claim's id, one entry a trial


def read_ledger(file: Path) -> Ledger:
    """Read the ledger in `file`, empty where there is none yet."""
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
    """Write the whole file at once; it is never edited by hand."""
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
