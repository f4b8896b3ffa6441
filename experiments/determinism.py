"""Judge greedy answers by the rules of `determinism.yaml`.

The rule on reproducibility was written before the run, the rule on caching answers by exact input after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.experiment.verdict import Outcome, RuleChange, VariantRows, Verdict

COSTS = {"price_prefill": "prefill", "price_decode_one": "decode of one", "price_decode_many": "of many"}
CHANGED = (
    RuleChange(
        what="the four prompts were chosen from 24, and outputs and runs were shortened; the rule stayed",
        when="2026-11-21",
        after="a search of 24 prompts for some whose bits depend on the batch",
        why="most prompts show no difference; so the record says that it happens, not how often",
    ),
)
EXACT_CACHE_CHANGED = (
    RuleChange(
        what=(
            "judged by this run: is the answer of one request the same in any batch. Before, by three tries of one "
            "request alone, and by how many requests of a generator fitted to Mooncake's hour stood there before "
            "(0.7%, which led to 'with limits')"
        ),
        when="2026-11-22",
        after="the calculation that judged it, and determinism-20261121-154531.json",
        why=(
            "a request alone gives one answer however the engine rounds in a batch; and how often a generator repeats "
            "itself says nothing of whether an answer may be kept, which is what is claimed"
        ),
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    return [reproduces(rows), exact_cache(rows)]


def reproduces(rows: VariantRows) -> Verdict:
    off = [row for row in rows if not row["batch_invariant"]]
    on = [row for row in rows if row["batch_invariant"]]
    return Verdict(
        claim="greedy-not-deterministic",
        says="Temperature 0 reproduces within one deployment; batch composition, hardware and ties can change it",
        rule=(
            "the same batch gives one answer, bit for bit, and varying batches more than one, as tokens in some "
            "type: holds; more than one as bits only, or the same batch too gives several: with limits; varying "
            "batches never change a bit: refuted. Other hardware is not tried"
        ),
        outcome=_outcome(off),
        reason="; ".join([*map(_describe, off), *map(_describe, on), *map(_price, on)]),
        limits=_limits(off),
        figures={f"outputs in varying batches, {row['variant']}": row["varying_outputs"] for row in rows},
        changed=CHANGED,
    )


def exact_cache(rows: VariantRows) -> Verdict:
    """Judge whether an answer at temperature 0 can be cached: whether it is the same in any batch composition."""
    off = [row for row in rows if not row["batch_invariant"]]
    on = [row for row in rows if row["batch_invariant"]]
    bits = all(row["same_bits"] == 1 and row["varying_bits"] == 1 for row in off)
    tokens = all(row["same_outputs"] == 1 and row["varying_outputs"] == 1 for row in off)
    mended = bool(on) and all(row["same_bits"] == 1 and row["varying_bits"] == 1 for row in on)
    return Verdict(
        claim="exact-cache",
        says="Answers at temperature 0 can be cached by exact input",
        rule=(
            "the answer of one request, computed again in the same and in varying batches, with no mode for it: the "
            "same to the last bit in every type: holds; the same tokens, or the same bits where batch_invariant is on: "
            "with limits; else refuted"
        ),
        outcome="holds" if bits else "holds-with-limits" if tokens or mended else "refuted",
        reason="; ".join(map(_describe, rows)),
        limits=(
            ("the same tokens for these prompts, not the same bits: a near tie may turn over" if tokens else
             "another answer may come in other batches")
            + (", and none does where batch_invariant is on" if mended else "")
        ),
        figures={f"outputs in varying batches, {row['variant']}": row["varying_outputs"] for row in rows},
        changed=EXACT_CACHE_CHANGED,
    )  # fmt: skip


def _outcome(off: VariantRows) -> Outcome:
    reproduces = all(row["same_bits"] == 1 for row in off)
    if all(row["varying_bits"] == 1 for row in off):
        return "refuted"
    parts = any(row["varying_outputs"] > 1 for row in off)
    return "holds" if reproduces and parts else "holds-with-limits"


def _limits(off: VariantRows) -> str:
    if any(row["same_bits"] != 1 for row in off):
        return "not even the same batch reproduces every bit"
    return "bits change with the batch, tokens did not"


def _describe(row: Mapping[str, Any]) -> str:
    return (
        f"{row['variant']}: {row['varying_outputs']} outputs, {row['varying_bits']} sets of bits in varying batches, "
        f"{row['same_bits']} in the same"
    )


def _price(row: Mapping[str, Any]) -> str:
    ratios = [f"{name} {row[key]:.2f}" for key, name in COSTS.items() if key in row]
    return (
        f"{row['variant']} takes {', '.join(ratios)} of the time without" if ratios else f"{row['variant']}: not timed"
    )


def example_rows(tokens: int, bits: int, same: int = 1, mended: bool = True) -> list[dict[str, Any]]:
    """Return rows like those of a run, as examples for the rules.

    In varying batch compositions they have `tokens` different outputs, and `bits` outputs that differ in bits; in equal
    compositions `same` ones. The batch-invariant mode has a single output if `mended`.
    """
    rows = []
    for invariant in (False, True):
        right = invariant and mended
        varying = {"varying_outputs": 1 if right else tokens, "varying_bits": 1 if right else bits}
        rows.append({"variant": "bfloat16 invariant" if invariant else "bfloat16", "batch_invariant": invariant,
                     "same_bits": 1 if right else same, "same_outputs": 1, **varying})  # fmt: skip
    return rows
