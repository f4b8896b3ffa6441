"""Figures of `thinking.yaml`: whether thoughts give more right answers, and what a larger budget costs."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row

BUDGETS = ("0", "16", "64", "256")


def accuracy(rows: VariantRows) -> dict[str, float | str]:
    """Return right answers of demo-chat to held-out questions, as shares: the gain of the best budget over none, its
    largest gain in one kind of question, which budget and kind, and every budget's share."""
    none = variant_row(rows, "0")
    gains = {name: variant_row(rows, name)["right"] - none["right"] for name in BUDGETS[1:]}
    best = max(gains, key=lambda name: gains[name])
    by_kind = variant_row(rows, best)["right_by_kind"]
    of_kinds = {kind: by_kind[kind] - share for kind, share in none["right_by_kind"].items()}
    kind = max(of_kinds, key=lambda name: of_kinds[name])
    shares = {f"right with {name}": variant_row(rows, name)["right"] for name in BUDGETS}
    return {"gain": gains[best], "gain_in_one_kind": of_kinds[kind], "best_budget": best, "kind": kind, **shares}


def cost(rows: VariantRows) -> dict[str, float]:
    """Return tokens generated a question with a budget of 256 over those with 64, and those with 64 over none."""
    none, some, most = (variant_row(rows, name)["output_tokens_per_question"] for name in ("0", "64", "256"))
    return {"tokens_times": most / some, "tokens_times_of_a_thought": some / none}
