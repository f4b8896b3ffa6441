"""Tabulate the ledger, one line per claim or all details of one claim, and draw the chart of a claim's evidence."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from workbench.claims.claim import (
    Claim,
    ClaimTrial,
    JudgeRule,
    MeasurementEvidence,
    MissingEvidence,
    RunEvidence,
    UnbuiltEvidence,
)
from workbench.claims.ledger import NO_TEST, NOT_RUN, Ledger, LedgerEntry, RecordFolder, judge_record
from workbench.claims.stored_record import StoredRecord
from workbench.display import Table
from workbench.errors import WorkbenchError
from workbench.files import write_atomically
from workbench.units import format_percent

HEADINGS = ("claim", "statement", "verdict", "machine", "level", "elsewhere")
ORDER = ("holds", "holds-with-limits", "refuted", "not-testable-here", NOT_RUN, NO_TEST)
TRIAL_FIELDS = ("reason", "limits", "machine", "level", "evidence", "record", "date", "remark", "rule", "command")


def latest_run_record(claim: Claim, records: RecordFolder) -> StoredRecord | None:
    """Return the latest record of the claim's first run with records; None without one."""
    runs = [trial.evidence for trial in claim.trials if isinstance(trial.evidence, RunEvidence)]
    return next((record for run in runs if (record := records.latest(run)) is not None), None)


def draw_claim(claim: Claim, records: RecordFolder, file: Path) -> None:
    """Draw the chart of the claim's run to `file`, .svg or .png. WorkbenchError without a run, or if drawing fails."""
    from workbench.experiment.experiment import Experiment
    from workbench.measure.compare_variants import draw_variants

    record = latest_run_record(claim, records)
    if record is None or record.experiment is None:
        raise WorkbenchError(f"claim {claim.id}: has no record of a run, so no picture; see `workbench claims show`")
    if file.suffix not in (".svg", ".png"):
        raise WorkbenchError(f"{file}: must end in .svg or .png")
    experiment = Experiment.from_record(record.experiment, record.name)
    content = draw_variants(experiment, record.numbers).render(file.suffix[1:])
    try:
        write_atomically(file, lambda out: out.write(content))
    except OSError as error:
        raise WorkbenchError(f"{file}: cannot be written ({error})") from error


def claim_entries(claim: Claim, ledger: Ledger) -> tuple[LedgerEntry, ...]:
    """Return the claim's ledger entries, with empty entries for trials missing from the ledger."""
    labels = [trial.evidence_label for trial in claim.trials]
    found = zip_longest(labels, ledger.get(claim.id, ())[: len(labels)])
    return tuple(entry if entry and entry.evidence == label else LedgerEntry(label) for label, entry in found)


def claim_rows(claims: Mapping[str, Claim], ledger: Ledger, verdict: str | None = None) -> list[dict[str, Any]]:
    """Return one row per claim, from its deciding trial; with `verdict`, only claims of that verdict."""
    rows = []
    for id, claim in claims.items():
        others = list(claim_entries(claim, ledger))
        first = others.pop(claim.deciding_trial)
        if verdict in (None, first.outcome_label):
            rows.append(
                {
                    "claim": id,
                    "statement": claim.says,
                    "verdict": first.outcome_label,
                    "machine": first.machine,
                    "level": first.level,
                    "elsewhere": [{"verdict": other.outcome_label, "machine": other.machine} for other in others],
                    "reason": first.reason,
                    "limits": first.limits,
                    "remark": first.remark,
                    "date": first.date,
                    "record": first.record,
                }
            )
    return rows


def count_verdicts(rows: list[dict[str, Any]]) -> str:
    """Count the claims by verdict, in one line."""
    counts = Counter(row["verdict"] for row in rows)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
    return f"{len(rows)} claim{'' if len(rows) == 1 else 's'}: {summary or 'none'}"


def row_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row of the listing as text, with a count of the verdicts of other trials."""
    others = Counter(other["verdict"] for other in row["elsewhere"])
    elsewhere = ", ".join(f"{others[verdict]} {verdict}" for verdict in ORDER if others[verdict])
    return row["claim"], row["statement"], row["verdict"], row["machine"], row["level"] or "", elsewhere


def measure_command(claim: Claim, trial: ClaimTrial, option: str = "") -> str:
    """Return the command that measures a trial again; `option` names a folder of other claims than the workbench's."""
    if isinstance(trial.evidence, RunEvidence) and not option:
        return f"workbench run experiments/{trial.evidence.name}.yaml"
    if isinstance(trial.evidence, MissingEvidence | UnbuiltEvidence):
        return "-"
    return f"workbench claims run {claim.id}{option}"


def rule_source(trial: ClaimTrial) -> str:
    """Return the source code of the rule; of a judge, the function that names the claim."""
    rule: Any = trial.rule
    try:
        if isinstance(rule, JudgeRule):
            functions = inspect.getmembers(inspect.getmodule(rule.judge), inspect.isfunction)
            sources = [inspect.getsource(f) for _, f in functions if f.__module__ == rule.judge.__module__]
            naming = [source for source in sources if f'"{rule.claim}"' in source]
            return (naming or [inspect.getsource(rule.judge)])[0].rstrip()
        return inspect.getsource(rule).rstrip()
    except (OSError, TypeError):
        return repr(rule)


def figures_table(claim: Claim, entries: tuple[LedgerEntry, ...]) -> Table:
    """Tabulate the sources' figures next to ours."""
    rows = [(f"source {source.name}", source.figures) for source in claim.sources]
    for entry in entries:
        whose = entry.machine or entry.evidence
        values = entry.figures or ({"": entry.reason} if entry.reason else {})
        rows += [(whose, f"{name}: {_number(value)}" if name else str(value)) for name, value in values.items()]
    return Table("figures of the sources, and ours", rows, ("whose", "figures"))


def claim_detail(claim: Claim, ledger: Ledger, records: RecordFolder, option: str = "") -> dict[str, Any]:
    """Return all details of one claim, as for JSON; `option` ends its commands."""
    entries = claim_entries(claim, ledger)
    trials = []
    for trial, entry in zip(claim.trials, entries, strict=True):
        trials.append(
            {
                "evidence": entry.evidence, "verdict": entry.outcome_label,
                "reason": entry.reason, "limits": entry.limits,
                "machine": entry.machine, "date": entry.date, "record": entry.record, "remark": entry.remark,
                "figures": dict(entry.figures), "rule": entry.rule, "rule_source": rule_source(trial),
                "command": measure_command(claim, trial, option), "level": entry.level, "no_test": entry.no_test,
                "changed": [str(change) for change in entry.changed],
                "never": {str(outcome): reason for outcome, reason in trial.impossible.items()},
            }
        )  # fmt: skip
    drawable = latest_run_record(claim, records) is not None
    where = claim.condition_tables(records) if claim.condition_tables is not None else ()
    tables = [*_by_machine(claim, records), *where]
    return {
        "claim": claim.id,
        "statement": claim.says,
        "sources": [{"name": source.name, "figures": source.figures} for source in claim.sources],
        "trials": trials,
        "picture": f"workbench claims show {claim.id} --picture {claim.id}.svg{option}" if drawable else None,
        "where": [{"title": t.title, "headings": list(t.headings), "rows": [list(r) for r in t.rows]} for t in tables],
    }


def _by_machine(claim: Claim, records: RecordFolder) -> list[Table]:
    """Tabulate all records of each trial, judged by the same rule, one row per machine."""
    found = []
    for trial in claim.trials:
        if not isinstance(trial.evidence, RunEvidence | MeasurementEvidence) or not (
            mine := records.all(trial.evidence)
        ):
            continue
        rows = [_machine_row(judge_record(claim, trial, record, records)) for record in mine]
        headings = ("machine", "level", "verdict", "figures", "date", "others", "record")
        found.append(Table(f"Records of {trial.evidence_label}, by machine; the first one decides", rows, headings))
    return found


def _machine_row(entry: LedgerEntry) -> tuple[str, ...]:
    values = ", ".join(f"{name}: {_number(value)}" for name, value in entry.figures.items()) or entry.reason
    contention = "" if entry.contention is None else format_percent(entry.contention)
    return (
        entry.machine,
        entry.level or "",
        entry.outcome_label,
        values,
        (entry.date or "")[:10],
        contention,
        entry.record or "",
    )


def trial_lines(trial: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) lines of one trial of `detail`: verdict, impossible outcomes, changes of the rule."""
    lines = [("no test", f"the rule cannot fail: {trial['no_test']}")] if trial["no_test"] else []
    lines += [(name, trial[name]) for name in TRIAL_FIELDS if trial[name]]
    lines += [("never", f"{outcome}: {why}") for outcome, why in trial["never"].items() if why != trial["no_test"]]
    return lines + [("changed", change) for change in trial["changed"]]


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
