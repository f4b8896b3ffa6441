"""Verdicts on speculation: the rules of `speculation.yaml`, written before the run, and what a sketch of it breaks."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.study.acceptance import tokens_a_check
from workbench.study.verdict import Rows, Verdict, row_of

Chances = Sequence[float]
TARGET: Chances = (
    0.5,
    0.3,
    0.15,
    0.05,
)  # what the target draws a token from, and the draft; what follows follows alike
DRAFT: Chances = (0.9, 0.1, 0.0, 0.0)
AFTER: Chances = (0.05, 0.15, 0.3, 0.5)  # the target's chances one position later
CLAIMED = 2.0  # times as fast, at least
SAME = 0.8  # share of greedy outputs that must be equal: in bfloat16 steps of other shapes may part at a near tie


def judge(rows: Rows) -> list[Verdict]:
    return [faster(rows), accepted(rows)]


def faster(rows: Rows) -> Verdict:
    drafts = [row_of(rows, name) for name in ("draft of 2", "draft of 3")]
    best = max(drafts, key=lambda row: row["speed_up_alone"])
    sampled = row_of(rows, "draft of 3, sampled")
    times, same = best["speed_up_alone"], min(row["same_tokens_share"] for row in drafts)
    exact = distance(right(TARGET, DRAFT), TARGET)
    lossless = exact < 1e-12 and same >= SAME
    outcome = "refuted" if times <= 1 or not lossless else "holds" if times >= CLAIMED else "holds-with-limits"
    chance = best["chance"]
    k = best["num_speculative_tokens"]
    return Verdict(
        claim="spec-decode",
        says="A small draft proposes, the target verifies in one pass: 2 to 3 times faster, the same distribution",
        rule=(
            f"the demo pair on held-out code, one sequence: at least {CLAIMED:g} times the tokens a second: holds; "
            f"more than 1: with limits; otherwise, or with fewer than {SAME:.0%} of greedy outputs the same, refuted"
        ),
        outcome=outcome,
        because=(
            f"{times:.2f} times with {k} drafted tokens, predicted {best['predicted_speed_up']:.2f}; sampled "
            f"{sampled['speed_up_alone']:.2f}; loses from load {best['loses_from'] or 'none tried'}; "
            f"{same:.0%} of greedy outputs the same; off the target's distribution by {exact:.1g}. A sketch without "
            f"the bonus token gives {tokens_a_check(chance, k) - chance**k:.2f} tokens a check, not "
            f"{tokens_a_check(chance, k):.2f}; one that ignores the draft's probabilities is off by "
            f"{distance(ignores_draft(TARGET, DRAFT), TARGET):.2f}, one that indexes one off by "
            f"{distance(right(AFTER, DRAFT), TARGET):.2f} (total variation, exact, on an example of four tokens)"
        ),
        limits=f"{times:.2f} times with this pair, one sequence; loses from load {best['loses_from'] or 'none tried'}",
        figures={"times as fast": times, "times as fast, predicted": best["predicted_speed_up"]},
    )


def accepted(rows: Rows) -> Verdict:
    row = row_of(rows, "draft of 3, sampled")
    halves = {half: row["by_text"][half]["chance"] for half in ("predictable", "unusual")}
    plain, odd = halves["predictable"], halves["unusual"]
    holds = 0.7 <= plain <= 0.8 and 0.4 <= odd <= 0.6
    bits = {half: row["by_text"][half]["bits_a_token"] for half in halves}
    return Verdict(
        claim="spec-acceptance",
        says="Acceptance is 70 to 80% on predictable text and 40 to 60% on unusual text",
        rule=(
            "the chance that a drafted token stands, sampled, on the half of the texts that take the target fewer bits "
            "a token and on the other: within both ranges: holds; higher on predictable text: with limits; else refuted"
        ),
        outcome="holds" if holds else "holds-with-limits" if plain > odd else "refuted",
        because=(
            f"{plain:.0%} at {bits['predictable']:.2f} bits a token, {odd:.0%} at {bits['unusual']:.2f}; the level is "
            "the pair's, not the text's alone"
        ),
        limits="higher on predictable text, at the level of this pair of models",
        figures={"acceptance, predictable text": plain, "acceptance, unusual text": odd},
    )


def right(target: Chances, draft: Chances) -> list[float]:
    """What comes of drawing from `draft`, accepting with min(1, p / q), else drawing from max(0, p - q): exactly."""
    stands = [q * min(1.0, p / q) if q else 0.0 for p, q in zip(target, draft, strict=True)]
    left = [max(0.0, p - q) for p, q in zip(target, draft, strict=True)]
    fallen = 1 - sum(stands)
    return [s + (fallen * rest / sum(left) if sum(left) else 0.0) for s, rest in zip(stands, left, strict=True)]


def ignores_draft(target: Chances, draft: Chances) -> list[float]:
    """The sketch: a token stands with the target's own probability of it, else one is drawn from the target."""
    stands = [q * p for p, q in zip(target, draft, strict=True)]
    fallen = 1 - sum(stands)
    return [s + fallen * p for s, p in zip(stands, target, strict=True)]


def distance(found: Chances, wanted: Chances) -> float:
    """Total variation: the share of outcomes that are not what they should be."""
    return 0.5 * sum(abs(a - b) for a, b in zip(found, wanted, strict=True))
