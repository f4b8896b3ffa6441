"""Tables of the ledger: one line a claim, and all details of one claim."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from workbench.ledger.claim import Claim, Measurement, Missing, OfJudge, Run, Table, Trial, Unbuilt
from workbench.ledger.entry import NO_TEST, NOT_RUN, Entry, Ledger
from workbench.ledger.picture import recorded_run
from workbench.ledger.rebuild import Records, entry_from

HEADINGS = ("claim", "statement", "verdict", "machine", "level", "elsewhere")
ORDER = ("holds", "holds-with-limits", "refuted", "not-testable-here", NOT_RUN, NO_TEST)


def entries_of(claim: Claim, ledger: Ledger) -> tuple[Entry, ...]:
    """Return the claim's entries of the ledger, and empty ones for trials that are missing there."""
    asked = [trial.told for trial in claim.trials]
    found = zip_longest(asked, ledger.get(claim.id, ())[: len(asked)])
    return tuple(entry if entry and entry.evidence == told else Entry(told) for told, entry in found)


def listing(claims: Mapping[str, Claim], ledger: Ledger, verdict: str | None = None) -> list[dict[str, Any]]:
    """Return one row a claim, from the trial that decides; only those with `verdict` where one is given."""
    rows = []
    for id, claim in claims.items():
        others = list(entries_of(claim, ledger))
        first = others.pop(claim.deciding)
        if verdict in (None, first.told):
            rows.append(
                {
                    "claim": id,
                    "statement": claim.says,
                    "verdict": first.told,
                    "machine": first.machine,
                    "level": first.level,
                    "elsewhere": [{"verdict": other.told, "machine": other.machine} for other in others],
                    "because": first.because,
                    "limits": first.limits,
                    "date": first.date,
                    "record": first.record,
                }
            )
    return rows


def counted(rows: list[dict[str, Any]]) -> str:
    """Count the claims by verdict, in one line."""
    counts = Counter(row["verdict"] for row in rows)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
    return f"{len(rows)} claim{'' if len(rows) == 1 else 's'}: {told or 'none'}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row of the listing as text; verdicts of other trials are counted."""
    others = Counter(other["verdict"] for other in row["elsewhere"])
    told = ", ".join(f"{others[verdict]} {verdict}" for verdict in ORDER if others[verdict])
    return row["claim"], row["statement"], row["verdict"], row["machine"], row["level"] or "", told


def command(claim: Claim, trial: Trial) -> str:
    """Return the command that measures a trial again."""
    if isinstance(trial.evidence, Run):
        return f"workbench run experiments/{trial.evidence.name}.yaml"
    return "-" if isinstance(trial.evidence, Missing | Unbuilt) else f"workbench claims run {claim.id}"


def rule_source(trial: Trial) -> str:
    """Return the source code of the rule; of a judge, the function that names the claim."""
    rule: Any = trial.rule
    try:
        if isinstance(rule, OfJudge):
            functions = inspect.getmembers(inspect.getmodule(rule.judge), inspect.isfunction)
            sources = [inspect.getsource(f) for _, f in functions if f.__module__ == rule.judge.__module__]
            naming = [source for source in sources if f'"{rule.claim}"' in source]
            return (naming or [inspect.getsource(rule.judge)])[0].rstrip()
        return inspect.getsource(rule).rstrip()
    except (OSError, TypeError):
        return repr(rule)


def figures(claim: Claim, entries: tuple[Entry, ...]) -> Table:
    """Tabulate the figures of the sources and ours."""
    rows = [(f"source {source.name}", source.figures) for source in claim.sources]
    for entry in entries:
        whose = entry.machine or entry.evidence
        told = entry.figures or ({"": entry.because} if entry.because else {})
        rows += [(whose, f"{name}: {_number(value)}" if name else str(value)) for name, value in told.items()]
    return Table("figures of the sources, and ours", ("whose", "figures"), rows)


def detail(claim: Claim, ledger: Ledger, records: Records) -> dict[str, Any]:
    """Return all details of one claim, as for JSON."""
    entries = entries_of(claim, ledger)
    trials = []
    for trial, entry in zip(claim.trials, entries, strict=True):
        trials.append(
            {
                "evidence": entry.evidence, "verdict": entry.told, "because": entry.because, "limits": entry.limits,
                "machine": entry.machine, "date": entry.date, "record": entry.record, "remark": entry.remark,
                "figures": dict(entry.figures), "rule": entry.rule, "rule_source": rule_source(trial),
                "command": command(claim, trial), "level": entry.level, "no_test": entry.no_test,
                "changed": [str(change) for change in entry.changed],
                "never": {str(outcome): reason for outcome, reason in trial.never.items()},
            }
        )  # fmt: skip
    drawable = recorded_run(claim, records) is not None
    where = claim.where(records) if claim.where is not None else ()
    tables = [*_by_machine(claim, records), *where]
    return {
        "claim": claim.id,
        "statement": claim.says,
        "sources": [{"name": source.name, "figures": source.figures} for source in claim.sources],
        "trials": trials,
        "picture": f"workbench claims show {claim.id} --picture {claim.id}.svg" if drawable else None,
        "where": [{"title": t.title, "headings": list(t.headings), "rows": [list(r) for r in t.rows]} for t in tables],
    }


def _by_machine(claim: Claim, records: Records) -> list[Table]:
    """Tabulate all records of each trial, judged by the same rule, one machine a row."""
    found = []
    for trial in claim.trials:
        if not isinstance(trial.evidence, Run | Measurement) or not (mine := records.all(trial.evidence)):
            continue
        rows = [_machine_row(entry_from(claim, trial, record, records)) for record in mine]
        headings = ("machine", "level", "verdict", "figures", "date", "others", "record")
        found.append(Table(f"Records of {trial.told}, by machine; the first one decides", headings, rows))
    return found


def _machine_row(entry: Entry) -> tuple[str, ...]:
    told = ", ".join(f"{name}: {_number(value)}" for name, value in entry.figures.items()) or entry.because
    busy = "" if entry.busy is None else f"{entry.busy:.0%}"
    return entry.machine, entry.level or "", entry.told, told, (entry.date or "")[:10], busy, entry.record or ""


TOLD = ("because", "limits", "machine", "level", "evidence", "record", "date", "remark", "rule", "command")


def told(trial: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) lines of one trial of `detail`: verdict, impossible outcomes, changes of the rule."""
    lines = [("no test", f"the rule cannot fail: {trial['no_test']}")] if trial["no_test"] else []
    lines += [(name, trial[name]) for name in TOLD if trial[name]]
    lines += [("never", f"{outcome}: {why}") for outcome, why in trial["never"].items() if why != trial["no_test"]]
    return lines + [("changed", change) for change in trial["changed"]]


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
