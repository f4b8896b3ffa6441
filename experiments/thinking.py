"""Judge `thinking.yaml` by rules written before its first run: whether thoughts give more right answers, and what a
larger budget costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.experiment.verdict import VariantRows, Verdict, variant_row

GAIN, OF_A_KIND, LOSS = 0.05, 0.20, 0.02  # shares of the questions
SAME, SOME = 1.05, 1.25  # times the tokens
BUDGETS = ("0", "16", "64", "256")


def judge(rows: VariantRows) -> list[Verdict]:
    return [accuracy(rows), cost(rows)]


def accuracy(rows: VariantRows) -> Verdict:
    none = variant_row(rows, "0")
    gains = {name: variant_row(rows, name)["right"] - none["right"] for name in BUDGETS[1:]}
    best = max(gains, key=lambda name: gains[name])
    of_kinds = _gains_by_kind(none, variant_row(rows, best))
    kind = max(of_kinds, key=lambda name: of_kinds[name])
    limited = of_kinds[kind] >= OF_A_KIND and gains[best] >= -LOSS
    shares = ", ".join(f"{name}: {variant_row(rows, name)['right']:.1%}" for name in BUDGETS)
    return Verdict(
        claim="thinking-accuracy",
        says="A thought before the answer makes more answers right",
        rule=(
            f"held-out questions of demo-chat, the best budget against none: at least {100 * GAIN:.0f} points more "
            f"over all questions: holds; at least {100 * OF_A_KIND:.0f} points more in one kind, and at most "
            f"{100 * LOSS:.0f} less over all: with limits; else refuted"
        ),
        outcome="holds" if gains[best] >= GAIN else "holds-with-limits" if limited else "refuted",
        reason=(
            f"right answers by budget: {shares}, of {none['questions']} questions each; {100 * gains[best]:+.1f} "
            f"points with {best}; most in {kind}: {100 * of_kinds[kind]:+.0f} points"
        ),
        limits=f"in {kind} alone",
        figures={"points gained": 100 * gains[best], "points gained in one kind": 100 * of_kinds[kind]},
    )


def cost(rows: VariantRows) -> Verdict:
    none, some, most = (variant_row(rows, name) for name in ("0", "64", "256"))
    times = most["output_tokens_per_question"] / some["output_tokens_per_question"]
    used = {name: variant_row(rows, name)["output_tokens_per_question"] for name in BUDGETS}
    listed = ", ".join(f"{name}: {tokens:.0f}" for name, tokens in used.items())
    return Verdict(
        claim="thinking-budget-cost",
        says="A budget is a ceiling: beyond what the model's thoughts need, a larger one costs nothing",
        rule=(
            f"tokens generated a question with a budget of 256 against 64: at most {SAME:g} times: holds; at most "
            f"{SOME:g}: with limits; more: refuted"
        ),
        outcome="holds" if times <= SAME else "holds-with-limits" if times <= SOME else "refuted",
        reason=(
            f"tokens a question by budget: {listed}; 256 against 64: {times:.2f} times; a thought of 64 costs "
            f"{some['output_tokens_per_question'] / none['output_tokens_per_question']:.2f} times the tokens and "
            f"{some['seconds_per_question'] / none['seconds_per_question']:.2f} times the seconds of none"
        ),
        limits=f"{times:.2f} times the tokens",
        figures={"times the tokens, 256 against 64": times},
    )


def _gains_by_kind(none: Mapping[str, Any], some: Mapping[str, Any]) -> dict[str, float]:
    return {kind: some["right_by_kind"][kind] - share for kind, share in none["right_by_kind"].items()}
