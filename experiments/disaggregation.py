"""Judge prefill interference and separate pools by the rules of `disaggregation.yaml`.

The growth of p99 TTFT with the queue was judged here too, by a rule that had been changed after a first run and
depended on the number of requests; `queue_tail.yaml` measures it now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.chunked_prefill import ms
from workbench.experiment.verdict import RuleChange, VariantRows, Verdict, variant_row

STALL, SOME = 3.0, 1.2  # times as long a gap
SLO_ATTAINMENT = 0.9  # share of requests that meet the SLO
GAP = "longest_gap_s_p99"
WHOLE, CHUNKED = "whole prompts", "chunks of 512"
SPLIT = ("4 for prompts and 4", "5 for prompts and 3")
CHANGED = (
    RuleChange(
        what="800 requests instead of 1,200, and no load twice; the rule's figures stayed",
        when="2026-11-21",
        after="a first run, which was not kept",
        why="the run should take less time",
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    return [chunks(rows), separate(rows)]


def chunks(rows: VariantRows) -> Verdict:
    whole, cut = variant_row(rows, WHOLE), variant_row(rows, CHUNKED)
    times = whole[GAP] / cut[GAP]
    return Verdict(
        claim="chunked-prefill",
        says="Splitting long prompts and mixing the chunks with decode steps keeps other requests from stalling",
        rule=(
            f"p99 over requests of the longest gap between tokens, prompts computed whole over chunks of 512: at least "
            f"{STALL:g} times: holds; {SOME:g}: with limits; less: refuted"
        ),
        outcome="holds" if times >= STALL else "holds-with-limits" if times >= SOME else "refuted",
        reason=(
            f"{ms(whole, GAP)} against {ms(cut, GAP)}: {times:.1f} times; TTFT p50 {ms(whole, 'ttft_s_p50')} "
            f"against {ms(cut, 'ttft_s_p50')}"
        ),
        limits=f"the longest gap is {times:.1f} times shorter, not {STALL:g}",
        figures={"times the longest gap, prompts computed whole": times},
        changed=CHANGED,
    )


def separate(rows: VariantRows) -> Verdict:
    """Judge separate pools: decodes should wait for their own steps only, and the pools should serve a higher load."""
    whole, cut = variant_row(rows, WHOLE), variant_row(rows, CHUNKED)
    split = max((variant_row(rows, name) for name in SPLIT), key=highest_load_within_slo)
    times = whole[GAP] / split[GAP]
    worth = highest_load_within_slo(split) >= max(highest_load_within_slo(whole), highest_load_within_slo(cut))
    return Verdict(
        claim="pd-disaggregation",
        says="Separate pools for prefill and decode remove that interference",
        rule=(
            f"the longest gap as above, one pool with whole prompts over separate pools: at least {STALL:g} times, and "
            f"the load at which {SLO_ATTAINMENT:.0%} get what was promised no lower than with one pool of as many "
            "instances, chunked or not: holds; the gap alone: with limits; else refuted"
        ),
        outcome="refuted" if times < STALL else "holds" if worth else "holds-with-limits",
        reason=(
            f"{ms(whole, GAP)} against {ms(split, GAP)} with {split['variant']}: {times:.1f} times; "
            f"{SLO_ATTAINMENT:.0%} kept up to {highest_load_within_slo(split):g} requests/s, "
            f"against {highest_load_within_slo(whole):g} with whole prompts and "
            f"{highest_load_within_slo(cut):g} with chunks of 512 in one pool of 8"
        ),
        limits="decodes do not wait, but one pool of as many instances serves a higher load as promised",
        figures={
            "times the longest gap, one pool": times,
            "requests/s, separate pools": highest_load_within_slo(split),
        },
        changed=CHANGED,
    )


def highest_load_within_slo(row: Mapping[str, Any]) -> float:
    """Return the highest load up to which every load attains the SLO; 0 if the lightest does not."""
    most = 0.0
    for point in row["curve"]:
        if point["slo_attainment"] < SLO_ATTAINMENT:
            break
        most = float(point["value"])
    return most
