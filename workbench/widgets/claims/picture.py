"""Draw claims: one line for each claim, and the details of the chosen claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from workbench import svg
from workbench.claims import tables
from workbench.display import Table

# A verdict's sign and colour; the sign makes it readable without colour.
VERDICT_SIGNS = {
    "holds": ("✓", "#009e73"), "holds-with-limits": ("≈", "#e69f00"), "refuted": ("✗", "#d55e00"),
    "not-testable-here": ("–", "#808080"), "not run yet": ("?", "#808080"), "no test": ("○", "#808080"),
}  # fmt: skip
STYLE = (
    "<style>.wb-claims-list{max-height:24em;overflow:auto}.wb-pic table{border-collapse:collapse;width:100%}"
    ".wb-pic td,.wb-pic th{text-align:left;vertical-align:top;padding:2px 8px;font-size:12px}"
    ".wb-claims-list td:first-child{white-space:nowrap}.wb-claims-list tr[data-key]{cursor:pointer}"
    ".wb-claims-list tr[aria-selected=true]{outline:2px solid #0072b2;outline-offset:-2px}"
    ".wb-pic .why{white-space:pre-wrap;max-width:60em}</style>"
)


def draw_claims(rows: Sequence[Mapping[str, Any]], counted: str, chosen: Mapping[str, Any] | None, running: str) -> str:
    """Draw the claims.

    Args:
        rows: rows of `tables.claim_rows`.
        counted: line with the number of claims by verdict.
        chosen: `tables.claim_detail` of the chosen claim, or None.
        running: progress of the claim's experiment, or "".
    """
    lines = [_line(row, index, chosen) for index, row in enumerate(rows)]
    head = "<tr><th>verdict</th><th>claim</th><th>statement</th></tr>"
    parts = [STYLE, f"<p>{escape(counted)}</p>"]
    parts.append(f'<div class="wb-claims-list" data-scroll="1"><table>{head}{"".join(lines)}</table></div>')
    if chosen is not None:
        parts += _detail(chosen)
    if running:
        parts.append(f'<pre role="status" class="why">{escape(running)}</pre>')
    return svg.html(*parts)


def _line(row: Mapping[str, Any], index: int, chosen: Mapping[str, Any] | None) -> str:
    picked = chosen is not None and chosen["claim"] == row["claim"]
    first = picked or (chosen is None and index == 0)  # the tabulator key stops once; arrow keys move from there
    return (
        f'<tr data-key="{escape(row["claim"])}" tabindex="{0 if first else -1}" aria-selected="{str(picked).lower()}" '
        f'data-tip="{svg.escape_attribute(row["reason"])}"><td>{draw_verdict(row["verdict"])}</td><td>{escape(row["claim"])}</td>'
        f"<td>{escape(row['statement'])}</td></tr>"
    )


def draw_verdict(outcome: str) -> str:
    sign, colour = VERDICT_SIGNS[outcome]
    return f'<b style="color:{colour}">{sign}</b>&nbsp;{escape(outcome)}'


def _detail(claim: Mapping[str, Any]) -> Iterable[str]:
    yield f"<h4>{escape(claim['claim'])}</h4><p>{escape(claim['statement'])}</p>"
    for source in claim["sources"]:
        yield f"<p>{escape(source['name'])}: {escape(source['figures'])}</p>"
    for trial in claim["trials"]:
        rows = [f"<tr><th>{draw_verdict(trial['verdict'])}</th><td>{escape(trial['evidence'])}</td></tr>"]
        rows += [
            f'<tr><td>{name}</td><td class="why">{escape(words)}</td></tr>' for name, words in tables.trial_lines(trial)
        ]
        rows += [f"<tr><td>{escape(n)}</td><td>{escape(_number(v))}</td></tr>" for n, v in trial["figures"].items()]
        yield f"<table>{''.join(rows)}</table>"
    yield from (Table(**table).markup() for table in claim["where"])


def _number(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"
