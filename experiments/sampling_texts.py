"""Judge the effect of sampling on texts by the rules of `sampling_texts.yaml`, written before the run.

A text is incoherent if it surprises the model `WILD` times as much a byte as the real continuation. It is repetitive if
its 4-grams repeat `AGAIN` times as often as there; a loop is an end that occurs three times in a row.
"""

from __future__ import annotations

from itertools import pairwise

from workbench.experiment.verdict import Outcome, VariantRows, Verdict, variant_row
from workbench.measure.sampled_texts import HELD_OUT_ROW

COOL = ("temperature 0.5", "temperature 0.8", "temperature 1", "temperature 1.2")
HOT = ("temperature 1.6", "temperature 2")
TOP_K, FREE = ("top_k 2", "top_k 4"), "temperature 1"
WILD, AGAIN = 2.0, 1.5
LOOPS, SOME = 0.5, 0.1  # shares of the texts that end in a loop, above free sampling's
ARGMAX = 0.98  # of greedy tokens; the backend's rounding may differ from float32 at a near tie


def judge(rows: VariantRows) -> list[Verdict]:
    return [temperature(rows), topk_loops(rows), greedy_repeats(rows)]


def temperature(rows: VariantRows) -> Verdict:
    came = variant_row(rows, HELD_OUT_ROW)["bits_per_byte"]
    ways = [variant_row(rows, name) for name in ("greedy", *COOL, *HOT)]
    spread = [row["predicted"]["drawn_entropy"] for row in ways]
    law = all(b > a for a, b in pairwise(spread)) and ways[0]["most_likely"] >= ARGMAX
    times = {name: variant_row(rows, name)["bits_per_byte"] / came for name in (*COOL, *HOT)}
    wild = [name for name in times if times[name] >= WILD]
    outcome: Outcome = "refuted"
    if law and set(wild) & set(HOT):
        outcome = "holds" if set(wild) == set(HOT) else "holds-with-limits"
    return Verdict(
        claim="sample-temperature",
        says="Below 1 sharpens, above 1 flattens, 0 is greedy; above 1.5 incoherent",
        rule=(
            f"what is drawn from after the same text has more entropy at every higher temperature, at 0 at least "
            f"{ARGMAX:.0%} of the tokens are the most likely ones, and texts at 1.6 and 2 have {WILD:g} times the bits "
            "a byte of text that really came, those at 1.2 and less do not: holds; the border lies elsewhere: with "
            "limits; else refuted"
        ),
        outcome=outcome,
        reason=(
            f"entropy {_list(spread)} bits a token; at 0 {ways[0]['most_likely']:.1%} most likely tokens; bits a byte, "
            f"times {came:.2f} of the text that came: "
            + ", ".join(f"{name.removeprefix('temperature ')}: {value:.2f}" for name, value in times.items())
        ),
        limits=f"texts are incoherent at {', '.join(name.removeprefix('temperature ') for name in wild)}",
        figures={f"times the bits a byte, {name}": value for name, value in times.items()},
    )


def topk_loops(rows: VariantRows) -> Verdict:
    free, came = variant_row(rows, FREE), variant_row(rows, HELD_OUT_ROW)
    few = [variant_row(rows, name) for name in TOP_K]
    more = [row["looped"] - free["looped"] for row in few]
    again = [row["repeated_4"] / max(free["repeated_4"], came["repeated_4"], 1e-9) for row in few]
    outcome: Outcome = "refuted"
    if min(more) >= LOOPS:
        outcome = "holds"
    elif max(more) >= SOME or min(again) >= AGAIN:
        outcome = "holds-with-limits"
    return Verdict(
        claim="sample-topk-loops",
        says="top_k under 5 on open-ended text leads to repetition loops",
        rule=(
            f"with top_k 2 and with 4 at least {LOOPS:.0%} more of the texts end in a loop than when all tokens may "
            f"be drawn: holds; {SOME:.0%} more with one of them, or {AGAIN:g} times the repeated 4-grams of free texts "
            "and of text that came, with both: with limits; else refuted"
        ),
        outcome=outcome,
        reason=(
            "texts that end in a loop and 4-grams that stood before: "
            + ", ".join(
                f"{row['variant']} {row['looped']:.0%} and {row['repeated_4']:.0%}" for row in (*few, free, came)
            )
        ),
        limits="they repeat themselves more, and few end in a loop",
        figures={f"texts that loop, {row['variant']}": row["looped"] for row in (*few, free)},
    )


def greedy_repeats(rows: VariantRows) -> Verdict:
    greedy, free, came = variant_row(rows, "greedy"), variant_row(rows, FREE), variant_row(rows, HELD_OUT_ROW)
    again = greedy["repeated_4"] / max(free["repeated_4"], came["repeated_4"], 1e-9)
    loops = greedy["looped"] - max(free["looped"], came["looped"])
    outcome: Outcome = "refuted"
    if greedy["repeated_alike"] and again >= AGAIN:
        outcome = "holds" if loops >= LOOPS else "holds-with-limits"
    return Verdict(
        claim="sample-greedy-repeats",
        says="Greedy is deterministic but repetitive",
        rule=(
            f"asked again it gives the same tokens, and {AGAIN:g} times the repeated 4-grams of free texts and of text "
            f"that came, and {LOOPS:.0%} more of its texts end in a loop: holds; without the loops: with limits; else "
            "refuted"
        ),
        outcome=outcome,
        reason=(
            f"the same again: {'yes' if greedy['repeated_alike'] else 'no'}; 4-grams that stood before "
            f"{greedy['repeated_4']:.0%}, drawn freely {free['repeated_4']:.0%}, in the text that came "
            f"{came['repeated_4']:.0%}; texts that end in a loop {greedy['looped']:.0%}, {free['looped']:.0%} and "
            f"{came['looped']:.0%}"
        ),
        limits="it repeats itself more, and few texts end in a loop",
        figures={"times the repeated 4-grams": again, "texts that loop more": loops},
    )


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
