"""Figures of `apart.yaml`: prefill and decode apart, measured on processes after a prediction by the simulator.

The same requests, at their times, go to two engines of one core each, arranged in three ways: one pool that computes
prompts in chunks between decodes; one pool that computes them whole; and two pools, one engine for prompts and one for
decodes, which share memory or send bytes. `--set workload.trace=PATH` takes a recorded trace in place of the generator
fitted to it.
"""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row

GAP = "longest_gap_s_p99"
WHOLE, CHUNKS, SHARED = "one pool, whole prompts", "one pool, chunks", "two pools, shared memory"


def interference(rows: VariantRows) -> dict[str, float]:
    """Return p99 over requests of the longest gap between tokens, one pool with whole prompts over two pools; and
    whether two pools keep no fewer requests within the SLO than one, chunked or not."""
    whole, two = variant_row(rows, WHOLE), variant_row(rows, SHARED)
    best = max(variant_row(rows, name)["slo_attainment"] for name in (WHOLE, CHUNKS))
    return {
        "gap_times": whole[GAP] / two[GAP],
        "no_less_within_slo": two["slo_attainment"] >= best,
        "attainment": two["slo_attainment"],
        "attainment_of_one_pool": best,
    }


def pays(rows: VariantRows) -> dict[str, float]:
    """Return the longest gap and the requests within the SLO of two pools, relative to one pool with chunks; measured,
    and as they were predicted."""
    one, two = variant_row(rows, CHUNKS), variant_row(rows, SHARED)
    figures = {"gap_times": two[GAP] / one[GAP], "attainment_times": two["slo_attainment"] / one["slo_attainment"]}
    if "prediction" in two and "prediction" in one:
        figures["predicted_gap_times"] = two["prediction"][GAP] / one["prediction"][GAP]
    return figures
