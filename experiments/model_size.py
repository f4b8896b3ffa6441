"""Judge the size of a model at batch 1 by the rules of `model_size.yaml`.

The rule on latency was written before the run, the one on the limit of a decode step after it (`CHANGED`).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from experiments.batch_size import listed
from experiments.prefill_decode_length import BOUND, TRIVIAL
from workbench.experiment.verdict import Outcome, RuleChange, VariantRows, Verdict

NAMES = ("demo-draft", "demo", "smollm2-135m", "tinyllama-1.1b")
BELOW = 0.8  # an exponent of the number of parameters up to it is less than linear
CHANGED = (
    RuleChange(
        what=(
            "asked of four shapes by this run; before, of one shape at one length (prefill_decode_length.yaml), and "
            "called 'holds' without saying of which"
        ),
        when="2026-11-22",
        after="model_size-20261121-170617.json and prefill_decode_length-20261121-165935.json",
        why="the shape is part of the answer: weights that lie in the processor's cache are not read from memory",
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    return [latency(rows), bandwidth_bound(rows)]


def latency(rows: VariantRows) -> Verdict:
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
    return Verdict(
        claim="model-size-not-linear",
        says="At small batch latency does not grow linearly with model size",
        rule=(
            f"the latency of one request goes with at most the power {BELOW} of the parameters between all "
            "neighbours in size: holds; between some: with limits; between none: refuted"
        ),
        outcome=outcome,
        reason=(
            f"from {listed(sizes, ',')} parameters {listed([1e3 * r['curve'][0]['e2el_s'] for r in found], ',.0f')} "
            f"ms: powers {listed(measured, '.2f')}, in all {whole:.2f}; predicted from the bytes and products alone "
            f"{listed(powers['predicted_e2el_s'], '.2f')}; of a decode step "
            f"{listed(powers['decode_step_s'], '.2f')}, at {listed(reads, '.0%')} of the read ceiling"
        ),
        limits="small models, whose steps are overhead more than reading; large ones grow as their bytes do",
        figures={"power of the parameters, in all": whole},
    )


def bandwidth_bound(rows: VariantRows) -> Verdict:
    shares = {row["variant"]: row["curve"][0] for row in rows if row["variant"] in NAMES}
    reads = {name: point["decode_bytes_share"] for name, point in shares.items()}
    so = [name for name in reads if reads[name] >= BOUND and shares[name]["decode_flops_share"] <= TRIVIAL]
    others = [name for name in reads if name not in so]
    return Verdict(
        claim="decode-bandwidth-bound",
        says="At small batch a decode step costs the time to read the weights once; the arithmetic is trivial",
        rule=(
            f"one sequence, bfloat16: reading takes at least {BOUND:.0%} of a decode step at the measured read "
            f"ceiling, and at most {TRIVIAL:.0%} of the FLOP/s ceiling is used: by every shape tried: holds; by some: "
            "with limits; by none: refuted"
        ),
        outcome="refuted" if not so else "holds-with-limits" if others else "holds",
        reason="of the read and of the FLOP/s ceiling: "
        + ", ".join(f"{name} {reads[name]:.0%} and {shares[name]['decode_flops_share']:.1%}" for name in reads),
        limits=f"one sequence in bfloat16 of {', '.join(so)}; not of {', '.join(others)}",
        figures={f"share of the read ceiling, {name}": share for name, share in reads.items()},
        changed=CHANGED,
    )


def _powers(sizes: list[float], times: list[float]) -> list[float]:
    pairs = zip(pairwise(sizes), pairwise(times), strict=True)
    return [_power(*sizes, *times) for sizes, times in pairs]


def _power(small: float, large: float, soon: float, late: float) -> float:
    return math.log(late / soon) / math.log(large / small)


def example_rows(power: float, reads: tuple[float, ...] = (0.5, 0.5, 0.5, 0.5)) -> list[dict[str, Any]]:
    """Return rows like those of a run, as examples for the rules.

    Latency grows with the power `power` of the number of parameters; steps reach the fractions `reads` of the read
    ceiling.
    """
    rows = []
    for number, (name, share) in enumerate(zip(NAMES, reads, strict=True), 6):
        parameters = 10**number
        times = dict.fromkeys(("e2el_s", "predicted_e2el_s", "decode_step_s"), parameters**power)
        point = times | {"decode_bytes_share": share, "decode_flops_share": 0.03}
        rows.append({"variant": name, "parameters": parameters, "curve": [point]})
    return rows
