"""Verdict on the size of a model at batch 1: the rule of `model_size.yaml`, written before the run."""

from __future__ import annotations

import math
from itertools import pairwise

from workbench.study.verdict import Outcome, Rows, Verdict

NAMES = ("demo-draft", "demo", "smollm2-135m", "tinyllama-1.1b")
BELOW = 0.8  # an exponent of the number of parameters up to it is less than linear


def judge(rows: Rows) -> list[Verdict]:
    found = sorted((row for row in rows if row["variant"] in NAMES), key=lambda row: row["parameters"])
    sizes = [row["parameters"] for row in found]
    powers = {key: _powers(sizes, [row["curve"][0][key] for row in found])
              for key in ("e2el_s", "predicted_e2el_s", "decode_step_s")}  # fmt: skip
    reads = [row["curve"][0]["decode_bytes_share"] for row in found]
    measured, (first, last) = powers["e2el_s"], (found[0], found[-1])
    whole = _power(sizes[0], sizes[-1], first["curve"][0]["e2el_s"], last["curve"][0]["e2el_s"])
    outcome: Outcome = "refuted"
    if min(measured) <= BELOW:
        outcome = "holds" if max(measured) <= BELOW else "holds-with-limits"
    return [
        Verdict(
            claim="model-size-not-linear",
            says="At small batch latency does not grow linearly with model size",
            rule=(
                f"the latency of one request goes with at most the power {BELOW} of the parameters between all "
                "neighbours in size: holds; between some: with limits; between none: refuted"
            ),
            outcome=outcome,
            because=(
                f"from {_list(sizes, ',')} parameters {_list([1e3 * r['curve'][0]['e2el_s'] for r in found], ',.0f')} "
                f"ms: powers {_list(measured, '.2f')}, in all {whole:.2f}; predicted from the bytes and products alone "
                f"{_list(powers['predicted_e2el_s'], '.2f')}; of a decode step "
                f"{_list(powers['decode_step_s'], '.2f')}, at {_list(reads, '.0%')} of the read ceiling"
            ),
            limits="small models, whose steps are overhead more than reading; large ones grow as their bytes do",
            figures={"power of the parameters, in all": whole},
        )
    ]


def _powers(sizes: list[float], times: list[float]) -> list[float]:
    pairs = zip(pairwise(sizes), pairwise(times), strict=True)
    return [_power(*sizes, *times) for sizes, times in pairs]


def _power(small: float, large: float, soon: float, late: float) -> float:
    return math.log(late / soon) / math.log(large / small)


def _list(values: list[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)
