"""Judge the time of prefill and decode by prompt length, by the rules of `prefill_decode_length.yaml`.

The rules were written before the run, except two that were changed after it (`FLAT_CHANGED`, `BOUND_CHANGED`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from workbench.experiment.verdict import Outcome, RuleChange, VariantRows, Verdict
from workbench.model.cost import StepCostModel
from workbench.model.shapes import named_shape
from workbench.simulate.roofline import HARDWARE

FLAT, HALFWAY = 0.2, 0.5  # powers of the length: 1.5 times for 8 times the tokens; as near to flat as to linear
STILL = 0.25  # a local exponent up to it: doubling the prompt costs at most a fifth more
LINEAR = (0.8, 1.2)  # local exponents that count as linear
FASTER, CLEARLY = 1.05, 1.15  # local exponents that count as faster than linear, and clearly so
BOUND, PARTLY = 0.5, 0.25  # shares of a ceiling that show a limit
TRIVIAL = 0.1  # of the FLOP/s ceiling
SAME, SHORT = 1.1, 1000  # times a decode step's time, and tokens up to which it should hold at least
MOSTLY_DECODE, HALF = 2 / 3, 1 / 2  # of a request's time
REQUEST_SHAPE = (1000, 200)
LARGE = (("llama-3.1-8b", "h100"), ("llama-3.1-70b", "h200"))
RECORD = "prefill_decode_length-20261121-165935.json"
FLAT_CHANGED = (
    RuleChange(
        what=(
            "with limits only where 1,024 tokens take nearer to as long as 128 than to 8 times as long (power below "
            "0.5); before, where time was flat between any shorter neighbours, 4 and 16 tokens say"
        ),
        when="2026-11-22",
        after=RECORD,
        why="by that record a tenfold prompt takes 9.4 times as long, which was shown as 'holds with limits'",
    ),
)
BOUND_CHANGED = (
    RuleChange(
        what=(
            "one shape at one length leads to 'with limits' at best, which name the shape; before, to 'holds'. What "
            "decides is the run over four shapes (model_size.yaml)"
        ),
        when="2026-11-22",
        after=f"{RECORD} and model_size-20261121-170617.json",
        why="the claim speaks of decode in general, and of the demo model it is not true here",
    ),
)
Points = Sequence[Mapping[str, Any]]


def judge(rows: VariantRows) -> list[Verdict]:
    points = rows[0]["curve"]
    curve = [point for point in points if (point["prompt_tokens"], point["output_tokens"]) != REQUEST_SHAPE]
    return [
        flat(curve), linear(curve), quadratic(curve), compute_bound(curve), flat_in_context(curve),
        bandwidth_bound(rows[0], curve), dominates(points),
    ]  # fmt: skip


def exponents(points: Points, key: str) -> list[tuple[int, int, float]]:
    """Return for each pair of neighbouring points both prompt lengths, and the exponent with which the time `key` grows
    between them."""
    return [
        (a["prompt_tokens"], b["prompt_tokens"],
         math.log(b[key] / a[key]) / math.log(b["prompt_tokens"] / a["prompt_tokens"]))
        for a, b in pairwise(points)
    ]  # fmt: skip


def flat(points: Points) -> Verdict:
    short, long = _at(points, 128), _at(points, 1024)
    times = long["prefill_s"] / short["prefill_s"]
    power = math.log(times) / math.log(long["prompt_tokens"] / short["prompt_tokens"])
    still = [end for _, end, power in exponents(points, "prefill_s") if power <= STILL]
    return Verdict(
        claim="prefill-flat",
        says="A 1,000-token prompt takes about as long as a 100-token one, not 10 times as long",
        rule=(
            f"prefill time goes from 128 to 1,024 tokens with at most the power {FLAT} of the length ({8**FLAT:.1f} "
            f"times as long): holds; with less than {HALFWAY} ({8**HALFWAY:.1f} times): with limits; else refuted"
        ),
        outcome="holds" if power <= FLAT else "holds-with-limits" if power < HALFWAY else "refuted",
        reason=(
            f"{times:.1f} times (power {power:.2f}), predicted "
            f"{long['predicted_prefill_s'] / short['predicted_prefill_s']:.1f}; flat up to {max(still, default=0)} "
            f"tokens; {_describe_exponents(points, 'prefill_s')}; 100 to 1,000 tokens by the roofline: "
            f"{_elsewhere(lambda bound: bound(0, 1000) / bound(0, 100), '{:.1f} times')}"
        ),
        limits=f"{times:.1f} times as long for 8 times the tokens; flat up to {max(still, default=0):,} tokens",
        figures={"times as long, 1,024 tokens over 128": times, "flat up to tokens": max(still, default=0)},
        changed=FLAT_CHANGED,
    )


def linear(points: Points) -> Verdict:
    found = exponents(points, "prefill_s")
    fit = [(start, end) for start, end, power in found if LINEAR[0] <= power <= LINEAR[1]]
    return Verdict(
        claim="prefill-linear",
        says="Doubling the prompt doubles prefill time",
        rule=(
            f"local exponents of prefill time within {LINEAR[0]} to {LINEAR[1]} between all neighbours: holds; between "
            "some: with limits; between none: refuted"
        ),
        outcome="holds" if len(fit) == len(found) else "holds-with-limits" if fit else "refuted",
        reason=f"so {_ranges(fit)}; {_describe_exponents(points, 'prefill_s')}, "
        f"predicted {_describe_exponents(points, 'predicted_prefill_s')}; "
        f"1,000 to 100,000 tokens, 100 times as many, by the roofline: "
        f"{_elsewhere(lambda bound: bound(0, 100_000) / bound(0, 1000), '{:.0f} times')}",
        limits=f"of the lengths tried: {_ranges(fit)} tokens",
        figures={f"exponent, {start:,} to {end:,} tokens": power for start, end, power in found},
    )


def quadratic(points: Points) -> Verdict:
    powers = [power for *_, power in exponents(points, "prefill_s")]
    last, longest = powers[-1], points[-1]["prompt_tokens"]
    return Verdict(
        claim="prefill-quadratic",
        says="Attention inside prefill is O(n^2), so at very long prompts time grows faster than linear",
        rule=(
            f"the local exponent of the last doubling is at least {CLEARLY}: holds; at least {FASTER}: with limits "
            "(it begins); else refuted"
        ),
        outcome="holds" if last >= CLEARLY else "holds-with-limits" if last >= FASTER else "refuted",
        reason=f"{last:.2f} up to {longest:,} tokens, predicted "
        f"{exponents(points, 'predicted_prefill_s')[-1][2]:.2f}; from 50,000 to 100,000 by the roofline: "
        f"{_elsewhere(lambda bound: math.log2(bound(0, 100_000) / bound(0, 50_000)), '{:.2f}')}",
        limits=f"it begins: the exponent is {last:.2f} at {longest:,} tokens",
        figures={"exponent of the last doubling": last},
    )


def compute_bound(points: Points) -> Verdict:
    """Judge whether prefill is compute-bound: it must come near the compute ceiling, and nearer than to the read
    ceiling."""
    so = [p["prompt_tokens"] for p in points if _computing(p)]
    prompts = [p["prompt_tokens"] for p in points]
    outcome: Outcome = "refuted"
    if so and so == prompts[-len(so) :]:  # from one length on
        outcome = "holds" if len(so) == len(prompts) else "holds-with-limits"
    return Verdict(
        claim="prefill-compute-bound",
        says="Prefill is limited by arithmetic",
        rule=(
            f"at least {PARTLY:.0%} of the FLOP/s that a matrix product reaches here, and a larger share of it than of "
            "the read ceiling: at every length: holds; from some length on: with limits; else refuted"
        ),
        outcome=outcome,
        reason="tokens, shares of FLOP/s and of bytes/s: "
        + ", ".join(f"{p['prompt_tokens']:,}: {p['prefill_flops_share']:.0%} and {p['prefill_bytes_share']:.0%}"
                    for p in points),
        limits=f"from {so[0]:,} tokens on" if so else "",
        figures={"limited by arithmetic from tokens": so[0]} if so else {},
    )  # fmt: skip


def flat_in_context(points: Points) -> Verdict:
    base = points[0]["decode_step_s"]
    same = [p["prompt_tokens"] for p in points if p["decode_step_s"] <= SAME * base]
    reach = max(same)
    far = [bound(99_999, 1) / bound(99, 1) for bound in map(_bound, *zip(*LARGE, strict=True))]
    whole = reach == points[-1]["prompt_tokens"]
    holds = whole and max(far) <= SAME
    return Verdict(
        claim="decode-flat-in-context",
        says="Tokens per second do not depend on the prompt's length (100 or 100,000)",
        rule=(
            f"a decode step at every context takes at most {SAME} times the shortest context's, and by the roofline of "
            f"large models at 100,000 tokens too: holds; measured up to {SHORT:,} tokens at least: with limits; else "
            "refuted"
        ),
        outcome="holds" if holds else "holds-with-limits" if reach >= SHORT else "refuted",
        reason=(
            f"{_times(points, 'decode_step_s', base)}, predicted "
            f"{points[-1]['predicted_decode_step_s'] / points[0]['predicted_decode_step_s']:.2f} times at the end; "
            f"100 to 100,000 tokens by the roofline: "
            f"{_elsewhere(lambda bound: bound(99_999, 1) / bound(99, 1), '{:.1f} times')}"
        ),
        limits=f"up to {reach:,} tokens here; at 100,000 it takes {min(far):.1f} to {max(far):.1f} times as long",
        figures={"the same up to tokens": reach, "times as long at the longest": points[-1]["decode_step_s"] / base},
    )


def bandwidth_bound(row: Mapping[str, Any], points: Points) -> Verdict:
    first = points[0]
    reads, computes = first["decode_bytes_share"], first["decode_flops_share"]
    shape = row["variant"]
    if "weight_bytes" in row:
        shape = f"{row['parameters']:,} parameters in {row['weight_bytes'] / 1e6:,.0f} MB"
    return Verdict(
        claim="decode-bandwidth-bound",
        says="At small batch a decode step costs the time to read the weights once; the arithmetic is trivial",
        rule=(
            f"one shape, one sequence, the shortest context: reading takes at least {BOUND:.0%} of the step at the "
            f"read ceiling and at most {TRIVIAL:.0%} of the FLOP/s ceiling is used: with limits, which name the shape; "
            "else refuted"
        ),
        outcome="holds-with-limits" if computes <= TRIVIAL and reads >= BOUND else "refuted",
        reason=(
            f"{first['decode_step_s'] * 1e3:.2f} ms a step, reading alone {first['predicted_decode_step_s'] * 1e3:.2f}:"
            f" {reads:.0%} of the read ceiling, {computes:.1%} of the FLOP/s ceiling"
        ),
        limits=f"one sequence of {first['prompt_tokens']} tokens, {shape}: {reads:.0%} of the read ceiling",
        figures={"share of the read ceiling": reads, "share of the FLOP/s ceiling": computes},
        changed=BOUND_CHANGED,
    )


def dominates(points: Points) -> Verdict:
    point = next(p for p in points if (p["prompt_tokens"], p["output_tokens"]) == REQUEST_SHAPE)
    share = point["decode_s"] / point["e2el_s"]
    predicted_share = point["predicted_decode_s"] / point["predicted_e2el_s"]
    return Verdict(
        claim="decode-dominates",
        says="1,000 tokens in and 200 out: most of the time is decode",
        rule=(
            f"decode steps take at least {MOSTLY_DECODE:.0%} of the time: holds; more than half: with limits; "
            "else refuted"
        ),
        outcome="holds" if share >= MOSTLY_DECODE else "holds-with-limits" if share > HALF else "refuted",
        reason=(
            f"{share:.0%} of {point['e2el_s']:.2f} s, predicted {predicted_share:.0%}; by the roofline: "
            f"{_elsewhere(lambda bound: 1 / (1 + bound(0, 1000) / (199 * bound(1100, 1))), '{:.0%}')}"
        ),
        limits=f"{share:.0%} of the time, more than half of it",
        figures={"share of the time that is decode": share},
    )


def _computing(point: Mapping[str, Any]) -> bool:
    return point["prefill_flops_share"] >= max(PARTLY, point["prefill_bytes_share"])


def _at(points: Points, tokens: int) -> Mapping[str, Any]:
    return next(point for point in points if point["prompt_tokens"] == tokens)


def _bound(model: str, hardware: str) -> Callable[[int, int], float]:
    """Return a function for the least seconds of a step over `length` tokens after `start` others, in bfloat16."""
    cost, sheet = StepCostModel(named_shape(model), 2, 2, 2), HARDWARE[hardware]
    return lambda start, length: cost([(start, length)], 1).seconds(sheet.flops, sheet.bandwidth)


def _elsewhere(figure: Callable[[Callable[[int, int], float]], float], form: str) -> str:
    """Format a figure of large models on data sheets' ceilings.

    Weights of all GPUs count together where one is too small.
    """
    return ", ".join(f"{model} on {hardware} {form.format(figure(_bound(model, hardware)))}"
                     for model, hardware in LARGE)  # fmt: skip


def _describe_exponents(points: Points, key: str) -> str:
    powers = exponents(points, key)
    return "exponents " + ", ".join(f"{power:.2f}" for *_, power in powers) + f" from {powers[0][0]} tokens on"


def _times(points: Points, key: str, base: float) -> str:
    return ", ".join(f"{p['prompt_tokens']:,}: {p[key] / base:.2f}" for p in points) + " times the shortest"


def _ranges(found: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{start:,} to {end:,}" for start, end in found) or "nowhere"
