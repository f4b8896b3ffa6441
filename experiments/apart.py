"""Judge separate prefill and decode pools by the rule of `apart.yaml`: measured on processes, after a prediction by the
simulator.

The same requests, at their times, go to two engines of one core each, arranged in three ways: one pool that computes
prompts in chunks between decodes; one pool that computes them whole; and two pools, one engine for prompts and one for
decodes, which share memory or send bytes. `--set workload.trace=PATH` takes a recorded trace in place of the generator
fitted to it.
"""

from __future__ import annotations

from typing import Any

from experiments.disaggregation import STALL
from workbench.experiment.verdict import RuleChange, VariantRows, Verdict, variant_row

GAP = "longest_gap_s_p99"
WHOLE, CHUNKS, SHARED = "one pool, whole prompts", "one pool, chunks", "two pools, shared memory"
HALF = 0.5
BESIDE = (
    RuleChange(
        what="the claim has the rule that simulated fleets had since 2026-11-21; whether pools pay here is beside it",
        when="2026-11-26",
        after="a first run on a busy machine (apart-20261126-044921), which judged only whether they pay",
        why="the claim says that the interference goes, not that it pays",
    ),
)
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
    return [interference(rows), pays(rows)]


def interference(rows: VariantRows) -> Verdict:
    """Judge the claim about prefill interference, at one load, by the rule that simulated fleets had before
    (`disaggregation.separate`)."""
    whole, two = variant_row(rows, WHOLE), variant_row(rows, SHARED)
    times = whole[GAP] / two[GAP]
    best = max(variant_row(rows, name)["slo_attainment"] for name in (WHOLE, CHUNKS))
    worth = two["slo_attainment"] >= best
    return Verdict(
        claim="pd-disaggregation",
        says="Separate pools for prefill and decode remove that interference",
        rule=(
            "p99 over requests of the longest gap between tokens, one pool with whole prompts over two pools: at least "
            f"{STALL:g} times, and no fewer requests within the SLO than with one pool of as many engines, chunked or "
            "not: holds; the gap alone: with limits; else refuted"
        ),
        outcome="refuted" if times < STALL else "holds" if worth else "holds-with-limits",
        reason=(
            f"{_ms(whole, GAP)} against {_ms(two, GAP)} with two pools: {times:.1f} times; "
            f"{two['slo_attainment']:.0%} of the requests within the SLO, against {best:.0%} with one pool"
        ),
        limits="decodes do not wait, but one pool of as many engines keeps more requests within the SLO",
        figures={
            "times the longest gap, prompts computed whole": times,
            "times the requests within the SLO": two["slo_attainment"] / best,
        },
        changed=BESIDE,
    )


def pays(rows: VariantRows) -> Verdict:
    """Judge whether separate pools are worth it on this machine, against one pool with chunked prefill."""
    one, two = variant_row(rows, CHUNKS), variant_row(rows, SHARED)
    times, kept = two[GAP] / one[GAP], two["slo_attainment"] / one["slo_attainment"]
    return Verdict(
        claim="pools-pay-here",
        says="Separate pools pay on this machine: decodes wait less, and as many requests are within the SLO",
        rule=(
            "p99 of the longest gap at most half of that of one pool with chunks, and no fewer requests within the "
            "SLO: holds; else it does not pay here, and is refuted"
        ),
        outcome="holds" if times <= HALF and kept >= 1 else "refuted",
        reason=(
            f"longest gap p99 {_ms(two, GAP)} with two pools against {_ms(one, GAP)} with one: {times:.2f} times; "
            f"{two['slo_attainment']:.0%} of the requests within the SLO against {one['slo_attainment']:.0%}; "
            f"predicted {_predicted(two, one)}"
        ),
        figures={"times the longest gap of one pool": times, "times the requests within the SLO": kept},
        changed=CHANGED,
    )


def _predicted(two: Any, one: Any) -> str:
    if "prediction" not in two or "prediction" not in one:
        return "nothing: executor.predict was off"
    its, other = two["prediction"], one["prediction"]
    kept = f"{its['slo_attainment']:.0%} against {other['slo_attainment']:.0%}"
    return f"{_ms(its, GAP)} against {_ms(other, GAP)}, and {kept}"


def _ms(row: Any, name: str) -> str:
    return f"{row[name] * 1e3:.0f} ms"
