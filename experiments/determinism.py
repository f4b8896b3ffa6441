"""The verdict on greedy answers: the rule of `determinism.yaml`, written before the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.study.verdict import Outcome, Rows, Verdict

COSTS = {"price_prefill": "prefill", "price_decode_one": "decode of one", "price_decode_many": "of many"}


def judge(rows: Rows) -> list[Verdict]:
    off = [row for row in rows if not row["batch_invariant"]]
    on = [row for row in rows if row["batch_invariant"]]
    return [
        Verdict(
            claim="greedy-not-deterministic",
            says="Temperature 0 reproduces within one deployment; batch composition, hardware and ties can change it",
            rule=(
                "the same company gives one answer, bit for bit, and varying company more than one, as tokens in some "
                "type: holds; more than one as bits only, or the same company too gives several: with limits; varying "
                "company never changes a bit: refuted. Other hardware is not tried"
            ),
            outcome=_outcome(off),
            because="; ".join([*map(_told, off), *map(_told, on), *map(_price, on)]),
            limits=_limits(off),
            figures={f"outputs in varying company, {row['variant']}": row["varying_outputs"] for row in rows},
        )
    ]


def _outcome(off: Rows) -> Outcome:
    reproduces = all(row["same_bits"] == 1 for row in off)
    if all(row["varying_bits"] == 1 for row in off):
        return "refuted"
    parts = any(row["varying_outputs"] > 1 for row in off)
    return "holds" if reproduces and parts else "holds-with-limits"


def _limits(off: Rows) -> str:
    if any(row["same_bits"] != 1 for row in off):
        return "not even the same company reproduces every bit"
    return "bits change with the company, tokens did not"


def _told(row: Mapping[str, Any]) -> str:
    return (
        f"{row['variant']}: {row['varying_outputs']} outputs, {row['varying_bits']} sets of bits in varying company, "
        f"{row['same_bits']} in the same"
    )


def _price(row: Mapping[str, Any]) -> str:
    told = [f"{name} {row[key]:.2f}" for key, name in COSTS.items() if key in row]
    return f"{row['variant']} takes {', '.join(told)} of the time without" if told else f"{row['variant']}: not timed"
