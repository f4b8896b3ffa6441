"""What the ways to draw a token make of a text, by what can be counted in it."""

from __future__ import annotations

from experiments import sampling_texts
from workbench.ledger.claim import Claim, Numbers, OfJudge, Run, Source, Trial
from workbench.study.texts import CAME

WAYS = ("greedy", *sampling_texts.COOL, *sampling_texts.HOT, *sampling_texts.FEW, CAME)


def _texts(wild: float, few: float, greedy: float) -> Numbers:
    """Rows in which hot texts have `wild` times the bits of text that came; of texts with few candidates and of greedy
    ones so large a share loops and repeats itself."""
    rows = []
    for number, name in enumerate(WAYS):
        looped = few if name in sampling_texts.FEW else greedy if name == "greedy" else 0.0
        bits = wild if name in sampling_texts.HOT else 1.0
        told = {"bits_per_byte": bits, "predicted": {"drawn_entropy": float(number)}, "most_likely": 1.0}
        rows.append({"variant": name, **told, "looped": looped, "repeated_4": 0.1 + looped, "repeated_alike": True})
    return rows


def _claim(id: str, says: str, *sources: Source) -> Claim:
    trial = Trial(
        Run("sampling_texts", ("workload.prompts=4",)),
        OfJudge(sampling_texts.judge, id),
        refuted_by=_texts(1.0, 0.0, 0.0),
        met_by=_texts(4.0, 0.8, 0.8),
    )
    return Claim(id, says, sources, (trial,))


CLAIMS = (
    _claim(
        "sample-temperature",
        "Below 1 sharpens, above 1 flattens, 0 is greedy; above 1.5 incoherent",
        Source("A to E", "incoherent above 1.5"),
    ),
    _claim(
        "sample-topk-loops",
        "top_k under 5 on open-ended text leads to repetition loops",
        Source("A", "under 5"),
    ),
    _claim(
        "sample-greedy-repeats",
        "Greedy is deterministic but repetitive",
        Source("B", "without figures"),
        Source("C", "without figures"),
    ),
)
