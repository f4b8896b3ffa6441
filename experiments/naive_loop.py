"""Judge the series of optimizations from the naive loop to all of them together.

The rule of `naive_loop.yaml` was written before the run.
"""

from __future__ import annotations

import math
from itertools import pairwise

from workbench.experiment.verdict import Outcome, VariantRows, Verdict, variant_row

LADDER = ("naive loop", "+ cache", "+ compiled step", "+ INT8 weights", "+ batch of 16", "+ drafts")
BESIDE = ("drafts, no batch", "INT4 for INT8", "16 bits for INT8")  # other ways to go on from a rung
WHOLE, NOTHING = 10.0, 1.05  # times the tokens a second: all together, and the least of a rung
RATE = "output_tokens_per_s"


def judge(rows: VariantRows) -> list[Verdict]:
    rates = {row["variant"]: row[RATE] for row in rows}
    bounds = {row["variant"]: row["predicted"][RATE] for row in rows}
    steps = {
        after: variant_row(rows, after)[RATE] / variant_row(rows, before)[RATE] for before, after in pairwise(LADDER)
    }
    predicted_gains = {after: bounds[after] / bounds[before] for before, after in pairwise(LADDER)}
    helps = {name: times for name, times in steps.items() if times >= NOTHING}
    top = max(LADDER, key=lambda name: rates[name])
    whole = rates[top] / rates[LADDER[0]]
    outcome: Outcome = "refuted"
    if whole >= WHOLE:
        outcome = "holds" if len(helps) == len(steps) else "holds-with-limits"
    return [
        Verdict(
            claim="naive-against-everything",
            says="Cache, compiled step, fewer bits, batch and drafts each speed the naive loop up, a lot together",
            rule=(
                f"the best rung of the ladder gives at least {WHOLE:g} times the tokens a second of the naive loop, "
                f"and every rung {NOTHING} times the one before: holds; some rung does not: with limits; less in all: "
                "refuted"
            ),
            outcome=outcome,
            reason=(
                f"{rates[LADDER[0]]:,.0f} to {rates[top]:,.0f} tokens/s ({top}): {whole:.0f} times; "
                + ", ".join(
                    f"{name} x{times:.2f} (bound x{predicted_gains[name]:.2f})" for name, times in steps.items()
                )
                + f"; product of all rungs {math.prod(steps.values()):.0f}; no gain from: "
                + (", ".join(name for name in steps if name not in helps) or "none")
                + "; besides: "
                + ", ".join(f"{name} {rates[name]:,.0f}" for name in BESIDE if name in rates)
                + " tokens/s"
            ),
            limits=f"no gain from {', '.join(name for name in steps if name not in helps)}",
            figures={"times the tokens a second, in all": whole},
        )
    ]
