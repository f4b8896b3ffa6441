"""Figures of `disaggregation.yaml`: prefill interference in one pool, and in separate pools.

The growth of p99 TTFT with the queue was judged here too, by a rule that had been changed after a first run and
depended on the number of requests; `queue_tail.yaml` measures it now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.experiment.verdict import VariantRows, variant_row

SLO_ATTAINMENT = 0.9  # share of requests that meet the SLO
GAP = "longest_gap_s_p99"
WHOLE, CHUNKED = "whole prompts", "chunks of 512"
SPLIT = ("4 for prompts and 4", "5 for prompts and 3")


def chunks(rows: VariantRows) -> dict[str, float]:
    """Return p99 over requests of the longest gap between tokens, prompts computed whole over chunks of 512, and the
    median TTFT of chunks over that of whole prompts."""
    whole, cut = variant_row(rows, WHOLE), variant_row(rows, CHUNKED)
    return {"gap_times": whole[GAP] / cut[GAP], "ttft_times_chunks": cut["ttft_s_p50"] / whole["ttft_s_p50"]}


def separate(rows: VariantRows) -> dict[str, float]:
    """Return that gap of one pool with whole prompts over separate pools, and whether the load at which 90% of requests
    attain the SLO is no lower than with one pool of as many instances, chunked or not."""
    whole = variant_row(rows, WHOLE)
    split = max((variant_row(rows, name) for name in SPLIT), key=highest_load_within_slo)
    load = highest_load_within_slo(split)
    best = max(highest_load_within_slo(whole), highest_load_within_slo(variant_row(rows, CHUNKED)))
    return {
        "gap_times": whole[GAP] / split[GAP],
        "no_less_within_slo": load >= best,
        "load_within_slo": load,
        "load_within_slo_one_pool": best,
    }


def highest_load_within_slo(row: Mapping[str, Any]) -> float:
    """Return the highest load up to which every load attains the SLO; 0 if the lightest does not."""
    most = 0.0
    for point in row["curve"]:
        if point["slo_attainment"] < SLO_ATTAINMENT:
            break
        most = float(point["value"])
    return most
