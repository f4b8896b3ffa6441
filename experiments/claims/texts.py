"""Claims on the texts that ways of sampling produce, by counts."""

from __future__ import annotations

from experiments import sampling_texts
from workbench.claims.claim import Claim, ClaimSource, ClaimTrial, EvidenceNumbers, JudgeRule, RunEvidence
from workbench.measure.sampled_texts import HELD_OUT_ROW

WAYS = ("greedy", *sampling_texts.COOL, *sampling_texts.HOT, *sampling_texts.TOP_K, HELD_OUT_ROW)


def _texts(wild: float, few: float, greedy: float, again: float = 0.0) -> EvidenceNumbers:
    """Return rows in which hot texts have `wild` times the bits of real continuations.

    Texts with few candidates loop at the share `few`, greedy ones at `greedy`; both repeat `again` more of their
    4-grams.
    """
    rows = []
    for number, name in enumerate(WAYS):
        looped = few if name in sampling_texts.TOP_K else greedy if name == "greedy" else 0.0
        bits = wild if name in sampling_texts.HOT else 1.0
        values = {"bits_per_byte": bits}
        if name != HELD_OUT_ROW:
            values |= {"predicted": {"drawn_entropy": float(number)}, "most_likely": 1.0, "repeated_alike": True}
        repeated = 0.1 + looped + (again if name in (*sampling_texts.TOP_K, "greedy") else 0)
        rows.append({"variant": name, **values, "looped": looped, "repeated_4": repeated})
    return rows


def _border_elsewhere(rows: EvidenceNumbers) -> EvidenceNumbers:
    """Return the same texts, of which those at 1.2 are as wild as hotter ones."""
    return [row | {"bits_per_byte": 4.0} if row["variant"] == "temperature 1.2" else row for row in rows]


def _claim(id: str, says: str, *sources: ClaimSource) -> Claim:
    trial = ClaimTrial(
        RunEvidence("sampling_texts", ("workload.prompts=4",)),
        JudgeRule(sampling_texts.judge, id),
        {
            "holds": _texts(4.0, 0.8, 0.8),
            "holds-with-limits": _border_elsewhere(_texts(4.0, 0.2, 0.0, again=0.4)),
            "refuted": _texts(1.0, 0.0, 0.0),
        },
    )
    return Claim(id, says, sources, (trial,))


CLAIMS = (
    _claim(
        "sample-temperature",
        "Below 1 sharpens, above 1 flattens, 0 is greedy; above 1.5 incoherent",
        ClaimSource("A to E", "incoherent above 1.5"),
    ),
    _claim(
        "sample-topk-loops",
        "top_k under 5 on open-ended text leads to repetition loops",
        ClaimSource("A", "under 5"),
    ),
    _claim(
        "sample-greedy-repeats",
        "Greedy is deterministic but repetitive",
        ClaimSource("B", "without figures"),
        ClaimSource("C", "without figures"),
    ),
)
