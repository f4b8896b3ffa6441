"""Figures of `prefill_decode_length.yaml`: the time of prefill and decode by prompt length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from workbench.experiment.verdict import VariantRows
from workbench.model.cost import StepCostModel
from workbench.model.shapes import named_shape
from workbench.simulate.roofline import HARDWARE

STILL = 0.25  # a local exponent up to it: doubling the prompt costs at most a fifth more
LINEAR = (0.8, 1.2)  # local exponents that count as linear
BOUND, PARTLY = 0.5, 0.25  # shares of a ceiling that show a limit
TRIVIAL = 0.1  # of the FLOP/s ceiling
SAME = 1.1  # times a decode step's time
REQUEST_SHAPE = (1000, 200)
LARGE = (("llama-3.1-8b", "h100"), ("llama-3.1-70b", "h200"))
Points = Sequence[Mapping[str, Any]]


def exponents(points: Points, key: str) -> list[tuple[int, int, float]]:
    """Return for each pair of neighbouring points both prompt lengths, and the exponent with which the time `key` grows
    between them."""
    return [
        (a["prompt_tokens"], b["prompt_tokens"],
         math.log(b[key] / a[key]) / math.log(b["prompt_tokens"] / a["prompt_tokens"]))
        for a, b in pairwise(points)
    ]  # fmt: skip


def _curve(rows: VariantRows) -> Points:
    points = rows[0]["curve"]
    return [point for point in points if (point["prompt_tokens"], point["output_tokens"]) != REQUEST_SHAPE]


def flat(rows: VariantRows) -> dict[str, float]:
    """Return the power of the length with which prefill time goes from 128 to 1,024 tokens, how many times as long it
    takes, measured and predicted, and the tokens up to which a doubling costs at most a fifth more."""
    points = _curve(rows)
    short, long = (next(p for p in points if p["prompt_tokens"] == tokens) for tokens in (128, 1024))
    times = long["prefill_s"] / short["prefill_s"]
    still = [end for _, end, power in exponents(points, "prefill_s") if power <= STILL]
    return {
        "power": math.log(times) / math.log(long["prompt_tokens"] / short["prompt_tokens"]),
        "times_as_long": times,
        "predicted_times_as_long": long["predicted_prefill_s"] / short["predicted_prefill_s"],
        "flat_up_to_tokens": max(still, default=0),
    }


def linear(rows: VariantRows) -> dict[str, float]:
    """Return the share of neighbouring lengths between which the local exponent of prefill time is within 0.8 to 1.2,
    and every exponent."""
    found = exponents(_curve(rows), "prefill_s")
    fit = sum(LINEAR[0] <= power <= LINEAR[1] for *_, power in found)
    return {
        "linear_share": fit / len(found),
        **{f"exponent, {start:,} to {end:,} tokens": power for start, end, power in found},
    }


def quadratic(rows: VariantRows) -> dict[str, float]:
    """Return the local exponent of prefill time of the last doubling, measured and predicted, and the longest
    prompt."""
    points = _curve(rows)
    last, predicted = (exponents(points, key)[-1][2] for key in ("prefill_s", "predicted_prefill_s"))
    return {"last_exponent": last, "predicted_last_exponent": predicted, "tokens": points[-1]["prompt_tokens"]}


def compute_bound(rows: VariantRows) -> dict[str, float]:
    """Return the share of the lengths, from some length on, at which prefill reaches at least 25% of the FLOP/s of a
    matrix product here, and a larger share of it than of the read ceiling; 0 if a longer prompt does not. Also the
    first of those lengths."""
    points = _curve(rows)
    prompts = [p["prompt_tokens"] for p in points]
    so = [p["prompt_tokens"] for p in points if p["prefill_flops_share"] >= max(PARTLY, p["prefill_bytes_share"])]
    onwards = bool(so) and so == prompts[-len(so) :]
    return {"bound_share": len(so) / len(prompts) if onwards else 0.0} | ({"bound_from_tokens": so[0]} if so else {})


def flat_in_context(rows: VariantRows) -> dict[str, float]:
    """Return the longest context at which a decode step takes at most 1.1 times the shortest context's, whether it is
    the longest tried, how many times as long a step takes there, and, by the roofline of large models, at 100,000
    tokens."""
    points = _curve(rows)
    base, last = points[0]["decode_step_s"], points[-1]
    reach = max(p["prompt_tokens"] for p in points if p["decode_step_s"] <= SAME * base)
    return {
        "flat_up_to_tokens": reach,
        "flat_to_the_end": reach == last["prompt_tokens"],
        "times_at_100k": max(_times_at_100k(model, hardware) for model, hardware in LARGE),
        "times_at_the_end": last["decode_step_s"] / base,
    }


def _times_at_100k(model: str, hardware: str) -> float:
    """Return a decode step's least time at 100,000 tokens over that at 100, in bfloat16 by a data sheet's ceilings."""
    cost, sheet = StepCostModel(named_shape(model), 2, 2, 2), HARDWARE[hardware]
    long, short = (cost([(start, 1)], 1).seconds(sheet.flops, sheet.bandwidth) for start in (99_999, 99))
    return long / short


def bandwidth_bound(rows: VariantRows) -> dict[str, float]:
    """Return 1 shape, if in one sequence at the shortest context reading takes at least half of the step at the read
    ceiling and at most 10% of the FLOP/s ceiling is used; the number of others; and both shares."""
    first = _curve(rows)[0]
    reads, computes = first["decode_bytes_share"], first["decode_flops_share"]
    so = computes <= TRIVIAL and reads >= BOUND
    return {"bound_shapes": so, "other_shapes": not so, "share of the read ceiling": reads,
            "share of the FLOP/s ceiling": computes}  # fmt: skip


def dominates(rows: VariantRows) -> dict[str, float]:
    """Return the share of a request's time that decode steps take, measured and predicted: 1,000 tokens in, 200 out."""
    shape = ("prompt_tokens", "output_tokens")
    point = next(p for p in rows[0]["curve"] if tuple(p[name] for name in shape) == REQUEST_SHAPE)
    return {
        "decode_share": point["decode_s"] / point["e2el_s"],
        "predicted_decode_share": point["predicted_decode_s"] / point["predicted_e2el_s"],
    }
