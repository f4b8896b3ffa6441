"""Judge a comparison of texts (`workload.kind: text_agreement`) by a rule.

judge: {path: "workbench.experiment.agreement:judge", arguments: {rule: "same_texts_share >= 0.9"}}
"""

from __future__ import annotations

from typing import Any

from workbench.experiment.rule import FigureRule
from workbench.experiment.verdict import VariantRows, Verdict
from workbench.units import format_percent

AGREEMENT_FIGURES = {
    "same_texts_share": "fraction of prompts with texts that are equal in all tokens",
    "first_divergence": "mean index of the first token that differs; equal texts count with their length",
    "tpot_ratio": "time per token relative to the first setting's: median over rounds",
    "tpot_ratio_low": "lower end of the interval of `tpot_ratio`",
    "tpot_ratio_high": "upper end of the interval of `tpot_ratio`",
    "ttft_ratio": "time to first token relative to the first setting's",
    "kv_bytes_ratio": "peak bytes of the KV cache relative to the first setting's",
}
JUDGE = "workbench.experiment.agreement:judge"


def parse_rule(rule: str) -> FigureRule:
    """Parse a rule over `AGREEMENT_FIGURES`. Raises WorkbenchError for an invalid rule."""
    return FigureRule.parse(rule, AGREEMENT_FIGURES)


def judge(rows: VariantRows, rule: str) -> list[Verdict]:
    """Return a verdict for each variant, compared with the first, which gets none."""
    parsed = parse_rule(rule)
    return [_verdict(parsed, dict(row), str(rows[0]["variant"])) for row in rows[1:]]


def _verdict(rule: FigureRule, row: dict[str, Any], baseline: str) -> Verdict:
    figures = {name: row.get(name) for name in AGREEMENT_FIGURES}
    sure = row.get("confidence")
    return Verdict(
        claim=str(row["variant"]),
        says=f"{row['variant']} against {baseline}",
        rule=rule.text,
        outcome=rule.outcome(figures),
        reason=rule.reason(figures) + (f" (interval of {format_percent(sure)})" if sure else ""),
        figures={name: value for name, value in figures.items() if value is not None},
    )
