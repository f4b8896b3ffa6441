"""Compute the figures of one position of a text under given sampling parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from workbench.request import SamplingParameters
from workbench.widgets.sampling.picture import CandidateToken, FilterFigures
from workbench.widgets.sampling.text import TextLogits


@dataclass(frozen=True)
class PositionFigures:
    """All figures of one position."""

    sieves: tuple[FilterFigures, ...]
    candidates: tuple[CandidateToken, ...]
    first: tuple[int, float]  # tokens and bits before any filter
    chosen: CandidateToken | None
    draws: Counter[int] = field(repr=False)


def position_figures(
    text: TextLogits, position: int, sampling: SamplingParameters, draws: int, num_bars: int, picked: int,
    spell: Callable[[int], str],
) -> PositionFigures:  # fmt: skip
    """`bars` tokens that are likely before or after the filters, the chosen and the picked one; the rest in one."""
    from workbench.sampling.stages import entropy_bits

    found = text.stages(position, sampling)
    before, after = found.model.double().softmax(-1), found.probabilities
    drawn = Counter(found.draw(text.uniforms(position, sampling.seed, draws)))
    shares = [stage.probabilities for stage in found.stages]
    fell = {token: number for number, stage in enumerate(found.stages, 1) for token in stage.removed.tolist()}
    best = before.maximum(after).topk(min(num_bars, len(before))).indices.tolist()
    chosen = text.token(position)
    named = dict.fromkeys([*best, *(each for each in (chosen, picked) if 0 <= each < len(before))])
    shown = sorted(named, key=lambda token: (-float(before[token]), token))
    candidates = [
        CandidateToken(
            spell(token), float(before[token]), float(after[token]), fell.get(token, 0), drawn[token],
            tuple(float(share[token]) for share in shares), token, token == chosen, token == picked,
        )
        for token in shown
    ]  # fmt: skip
    if rest := len(before) - len(shown):
        hidden = [float(each.sum() - each[shown].sum()) for each in (before, after, *shares)]
        hidden = [max(0.0, share) for share in hidden]
        others = draws - sum(drawn[token] for token in shown)
        candidates.append(CandidateToken(f"{rest:,} others", hidden[0], hidden[1], 0, others, tuple(hidden[2:])))
    kept = [1.0, *(stage.kept for stage in found.stages)]
    sieves = tuple(
        FilterFigures(stage.name, kept[number], stage.kept, stage.left, entropy_bits(shares[number]))
        for number, stage in enumerate(found.stages)
    )
    first = int((found.model > -float("inf")).sum()), entropy_bits(before)
    mine = next((each for each in candidates if each.chosen), None)
    return PositionFigures(sieves, tuple(candidates), first, mine, drawn)
