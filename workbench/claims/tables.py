"""Tabulate claims: one line for each, or everything about one of them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.claims.claim import LoadedClaim, Trial
from workbench.claims.summary import Summary
from workbench.custom import resolve_path
from workbench.display import Table
from workbench.files import own_file
from workbench.own_folder import OWN_FOLDER
from workbench.units import format_percent

NOT_RUN = "not run yet"
NO_TEST = "no test"  # shown for a rule that cannot refute
HEADINGS = ("claim", "statement", "verdict", "machine", "level", "elsewhere")
ORDER = ("holds", "holds-with-limits", "refuted", "not-testable-here", NOT_RUN, NO_TEST)
TRIAL_FIELDS = ("reason", "limits", "model", "machine", "level", "evidence", "record", "date", "remark", "rule",
                "command")  # fmt: skip


def verdict_row(claim: LoadedClaim, trial: Trial, summary: Summary | None) -> dict[str, Any]:
    """Return the verdict of a trial by one of its summaries, with what it rests on; without a summary that it was not
    run."""
    no_test = trial.never.get("refuted", "")
    row: dict[str, Any] = {"evidence": trial.label, "verdict": NO_TEST if no_test else NOT_RUN, "no_test": no_test,
                           "rule": trial.rule, **dict.fromkeys(("reason", "limits", "machine", "model", "record"), ""),
                           "level": None, "date": None, "figures": {}}  # fmt: skip
    if trial.missing:
        return row | {"verdict": "not-testable-here", "reason": f"needs {trial.missing}"}
    if trial.unbuilt:
        return row | {"reason": f"not built: {trial.unbuilt}"}
    if summary is None:
        return row
    verdict = claim.judge(trial, summary.figures)
    row |= {name: getattr(summary, name) for name in ("machine", "model", "level", "date", "record")}
    row |= {"reason": verdict.reason, "limits": verdict.limits, "figures": dict(verdict.figures)}
    return row if no_test else row | {"verdict": verdict.outcome}


def deciding_rows(claim: LoadedClaim) -> list[dict[str, Any]]:
    """Return the verdict of each trial, by its deciding summary."""
    return [verdict_row(claim, trial, next(iter(claim.of_trial(trial)), None)) for trial in claim.trials]


def claim_rows(claims: Mapping[str, LoadedClaim], verdict: str | None = None) -> list[dict[str, Any]]:
    """Return one row per claim, from its deciding trial; with `verdict`, only claims of that verdict."""
    rows = []
    for id, claim in claims.items():
        others = deciding_rows(claim)
        first = others.pop(claim.deciding_trial)
        if verdict in (None, first["verdict"]):
            shown = ("verdict", "machine", "level", "model", "reason", "limits", "date", "record")
            elsewhere = [{name: other[name] for name in ("verdict", "machine", "model")} for other in others]
            rows.append({"claim": id, "statement": claim.settings.says, "elsewhere": elsewhere,
                         **{name: first[name] for name in shown}})  # fmt: skip
    return rows


def count_verdicts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Count the claims by verdict, in one line."""
    return f"{len(rows)} claim{'' if len(rows) == 1 else 's'}: {_counts(row['verdict'] for row in rows) or 'none'}"


def row_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row of the listing as text, with a count of the verdicts of other trials."""
    elsewhere = _counts(other["verdict"] for other in row["elsewhere"])
    return row["claim"], row["statement"], row["verdict"], row["machine"], row["level"] or "", elsewhere


def _counts(verdicts: Any) -> str:
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])


def figures_table(detail: Mapping[str, Any]) -> Table:
    """Tabulate the sources' figures next to ours; `detail` is a claim's `claim_detail`."""
    rows = [(f"source {source['name']}", source["figures"]) for source in detail["sources"]]
    for trial in detail["trials"]:
        values = trial["figures"] or ({"": trial["reason"]} if trial["reason"] else {})
        named = ((f"{name}: {_number(value)}" if name else str(value)) for name, value in values.items())
        rows += [(trial["machine"] or trial["evidence"], words) for words in named]
    return Table("figures of the sources, and ours", rows, ("whose", "figures"))


def claim_detail(claim: LoadedClaim, option: str = "") -> dict[str, Any]:
    """Return all details of one claim, as for JSON; `option` ends its commands."""
    trials = []
    for trial, row in zip(claim.trials, deciding_rows(claim), strict=True):
        trials.append({
            **row, "remark": remark(claim, trial), "command": measure_command(claim, trial, option),
            "rule_source": figures_source(claim, trial), "changed": [str(change) for change in trial.changed],
            "never": {str(outcome): reason for outcome, reason in trial.never.items()},
        })  # fmt: skip
    where = (
        resolve_path(claim.path_of(claim.settings.where))(**claim.trials[0].arguments) if claim.settings.where else ()
    )
    tables = [*_by_machine(claim), *where]
    return {
        "claim": claim.name,
        "statement": claim.settings.says,
        "sources": [{"name": name, "figures": figures} for name, figures in claim.settings.sources.items()],
        "trials": trials,
        "where": [{"title": t.title, "headings": list(t.headings), "rows": [list(r) for r in t.rows]} for t in tables],
    }


def remark(claim: LoadedClaim, trial: Trial) -> str:
    """Return warnings about the deciding summary: contention, or inputs that have changed since."""
    from workbench.claims.evidence import inputs_of

    summary = next(iter(claim.of_trial(trial)), None)
    if summary is None:
        return ""
    found = []
    if summary.is_noisy:
        found.append(f"other processes took {format_percent(summary.others_cpu_share)} of the processor")
    if summary.inputs != inputs_of(claim, trial):
        found.append("the experiment or the rule has been changed since")
    return "; ".join(found)


def measure_command(claim: LoadedClaim, trial: Trial, option: str = "") -> str:
    """Return the command that measures a trial again; `option` names a folder of other claims than the workbench's."""
    return "-" if trial.missing or trial.unbuilt else f"workbench claims run {claim.name}{option}"


def figures_source(claim: LoadedClaim, trial: Trial) -> str:
    """Return the source code of the function that returns the trial's figures, without importing it; empty if its file
    is not found."""
    path, _, name = claim.path_of(trial.figures or trial.calculation or trial.measurement).rpartition(":")
    file = own_file(Path(path)) if path.endswith(".py") else OWN_FOLDER / f"{path.replace('.', '/')}.py"
    if not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8")
    found = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return "\n".join(ast.get_source_segment(text, node) or "" for node in found)


def _by_machine(claim: LoadedClaim) -> list[Table]:
    """Tabulate all summaries of each trial that is measured, judged by the same rule, one row per model and machine."""
    headings = ("model", "machine", "level", "verdict", "figures", "date", "others", "record")
    return [
        Table(f"Summaries of {trial.label}, by machine; the first one decides",
              [_machine_row(claim, trial, each) for each in found], headings)
        for trial in claim.trials
        if not trial.calculation and (found := claim.of_trial(trial))
    ]  # fmt: skip


def _machine_row(claim: LoadedClaim, trial: Trial, summary: Summary) -> tuple[str, ...]:
    row = verdict_row(claim, trial, summary)
    values = ", ".join(f"{name}: {_number(value)}" for name, value in row["figures"].items()) or row["reason"]
    others = "" if summary.others_cpu_share is None else format_percent(summary.others_cpu_share)
    return (summary.model, summary.machine, summary.level or "", row["verdict"], values, summary.date[:10], others,
            summary.record)  # fmt: skip


def trial_lines(trial: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) lines of one trial of `claim_detail`: verdict, impossible outcomes, changes of the rule."""
    lines = [("no test", f"the rule cannot fail: {trial['no_test']}")] if trial["no_test"] else []
    lines += [(name, trial[name]) for name in TRIAL_FIELDS if trial[name]]
    lines += [("never", f"{outcome}: {why}") for outcome, why in trial["never"].items() if why != trial["no_test"]]
    return lines + [("changed", change) for change in trial["changed"]]


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
