"""Figures of `sampling_texts.yaml`: the effect of sampling on texts.

A text is incoherent if it surprises the model twice as much a byte as the real continuation. A loop is an end that
occurs three times in a row.
"""

from __future__ import annotations

from itertools import pairwise

from workbench.experiment.verdict import VariantRows, variant_row
from workbench.measure.sampled_texts import HELD_OUT_ROW

COOL = ("temperature 0.5", "temperature 0.8", "temperature 1", "temperature 1.2")
HOT = ("temperature 1.6", "temperature 2")
TOP_K, FREE = ("top_k 2", "top_k 4"), "temperature 1"
WILD = 2.0  # times the bits a byte of text that really came


def temperature(rows: VariantRows) -> dict[str, float]:
    """Return whether what is drawn from after the same text has more entropy at every higher temperature, the share of
    most likely tokens at 0, how many temperatures above 1.5 and below give incoherent texts, and every temperature's
    bits a byte over those of text that really came."""
    real = variant_row(rows, HELD_OUT_ROW)["bits_per_byte"]
    ways = [variant_row(rows, name) for name in ("greedy", *COOL, *HOT)]
    spread = [row["predicted"]["drawn_entropy"] for row in ways]
    times = {name: variant_row(rows, name)["bits_per_byte"] / real for name in (*COOL, *HOT)}
    return {
        "entropy_grows": all(b > a for a, b in pairwise(spread)),
        "most_likely_at_zero": ways[0]["most_likely"],
        "incoherent_hot": sum(times[name] >= WILD for name in HOT),
        "incoherent_cool": sum(times[name] >= WILD for name in COOL),
        **{f"times the bits a byte, {name}": value for name, value in times.items()},
    }


def topk_loops(rows: VariantRows) -> dict[str, float]:
    """Return how many more of the texts end in a loop with top_k 2 and with 4 than when all tokens may be drawn: the
    least and the most; how often 4-grams are repeated, at least, over free texts and text that came; and the shares of
    texts that loop."""
    few, free = [variant_row(rows, name) for name in TOP_K], variant_row(rows, FREE)
    more = [row["looped"] - free["looped"] for row in few]
    return {
        "least_more_loops": min(more),
        "most_more_loops": max(more),
        "repeated_times": min(row["repeated_4"] for row in few) / _usual_repeats(rows),
        **{f"texts that loop, {row['variant']}": row["looped"] for row in (*few, free)},
    }


def greedy_repeats(rows: VariantRows) -> dict[str, float]:
    """Return whether greedy texts asked again have the same tokens, how often their 4-grams are repeated over free
    texts and text that came, and how many more of them end in a loop."""
    greedy, free, real = variant_row(rows, "greedy"), variant_row(rows, FREE), variant_row(rows, HELD_OUT_ROW)
    return {
        "same_again": greedy["repeated_alike"],
        "repeated_times": greedy["repeated_4"] / _usual_repeats(rows),
        "more_loops": greedy["looped"] - max(free["looped"], real["looped"]),
    }


def _usual_repeats(rows: VariantRows) -> float:
    return max(variant_row(rows, FREE)["repeated_4"], variant_row(rows, HELD_OUT_ROW)["repeated_4"], 1e-9)
