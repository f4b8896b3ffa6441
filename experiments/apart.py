"""Judge prefill and decode apart by the rule of `apart.yaml`: measured on processes, predicted before by the simulator.

The same requests, at their times, go to two engines of one core each: one pool that computes prompts in chunks between
decodes, one pool that computes them whole, and two pools (one engine for prompts, one for decodes) that share memory or
send bytes. `--set workload.trace=PATH` takes a recorded trace in place of the generator fitted to it.
"""

from __future__ import annotations

from typing import Any

from workbench.experiment.verdict import RuleChange, VariantRows, Verdict, variant_row

GAP = "longest_gap_s_p99"
CHUNKS, SHARED = "one pool, chunks", "two pools, shared memory"
HALF = 0.5
CHANGED = (
    RuleChange(
        what=(
            "the traffic is Azure's generator at a load of about 0.65 by the simulator, in place of a trace's first 30 "
            "requests; the rule stayed"
        ),
        when="2026-11-26",
        after="no run: the script before this had none",
        why="it runs on a fresh clone, and a load is chosen rather than met by chance",
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    """Judge whether separate pools pay here: decodes wait less, and as many requests keep their promise."""
    one, two = variant_row(rows, CHUNKS), variant_row(rows, SHARED)
    times, kept = two[GAP] / one[GAP], two["slo_attainment"] / one["slo_attainment"]
    pays = times <= HALF and kept >= 1
    return [
        Verdict(
            claim="pd-disaggregation",
            says="Separate pools for prefill and decode pay: decodes wait less, and as many promises are kept",
            rule=(
                "p99 of the longest gap at most half of that of one pool with chunks, and goodput no lower: pays, and "
                "holds; else it does not pay here, and is refuted"
            ),
            outcome="holds" if pays else "refuted",
            reason=(
                f"longest gap p99 {_ms(two, GAP)} with two pools against {_ms(one, GAP)} with one: {times:.2f} times; "
                f"{two['slo_attainment']:.0%} of the requests within the SLO against {one['slo_attainment']:.0%}; "
                f"predicted {_predicted(two, one)}"
            ),
            figures={"times the longest gap of one pool": times, "times the requests within the SLO": kept},
            changed=CHANGED,
        )
    ]


def _predicted(two: Any, one: Any) -> str:
    if "prediction" not in two or "prediction" not in one:
        return "nothing: executor.predict was off"
    its, other = two["prediction"], one["prediction"]
    kept = f"{its['slo_attainment']:.0%} against {other['slo_attainment']:.0%}"
    return f"{_ms(its, GAP)} against {_ms(other, GAP)}, and {kept}"


def _ms(row: Any, name: str) -> str:
    return f"{row[name] * 1e3:.0f} ms"
