"""Compute the exact outcome of an acceptance rule by summing over every draft and every verdict.

Probabilities are multiples of a quarter. A ratio p / q of two such has a denominator of at most 4, so no acceptance
threshold lies within a twelfth: one random number from each twelfth represents all of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from workbench.sampling.verify import Draft, rejection_sample

DENOMINATOR = 4  # probabilities are multiples of 1 / DENOMINATOR
NUM_CELLS = math.lcm(*range(1, DENOMINATOR + 1))
Tokens = tuple[int, ...]
NextTokenTable = Mapping[
    Tokens, Sequence[float]
]  # the distribution of the next token, by as many of the last ones as it knows
TargetRow = Callable[[int], Tensor]  # the target's row at a drafted position
AcceptanceRule = Callable[[Draft, TargetRow, list[float]], tuple[int, Tensor]]
Proposes = Callable[[Sequence[float], int], bool]  # whether a draft goes on, by its distribution and the token drawn


def always(row: Sequence[float], token: int) -> bool:
    return True


def speculative_distribution(
    target: NextTokenTable,
    draft: NextTokenTable | None,
    drafted: int,
    rule: AcceptanceRule = rejection_sample,
    proposes: Proposes = always,
) -> dict[Tokens, float]:
    """Return the distribution of `drafted` + 1 tokens when at most `drafted` are proposed and `rule` verifies them.

    Args:
        target: the target's distributions, by prefix (or by its last tokens, for a target that knows only those).
        draft: the draft's; None is a draft that proposes token 0 each time, with certainty.
        rule: the acceptance rule, called as `workbench.sampling.verify.rejection_sample`.
        proposes: a draft ends before the first token for which it returns False.
    """
    vocab = range(_size(target))
    chances: dict[Tokens, float] = dict.fromkeys(itertools.product(vocab, repeat=drafted + 1), 0.0)
    for path, weight in _paths(draft, drafted, proposes) if draft else [((0,) * drafted, 1.0)]:
        rows = [_row(draft, path[:i]) for i in range(len(path))] if draft else []
        proposed = Draft(path, torch.tensor(rows, dtype=torch.float64) if rows else None)
        for cells in itertools.product(range(NUM_CELLS), repeat=len(path)):
            standing, left = rule(
                proposed,
                lambda i, path=path: torch.tensor(_row(target, path[:i]), dtype=torch.float64),
                [(cell + 0.5) / NUM_CELLS for cell in cells],
            )
            for token in vocab:
                begun = (*path[:standing], token)
                chance = weight * float(left[token] / left.sum()) / NUM_CELLS ** len(path)
                for rest in itertools.product(vocab, repeat=drafted - standing):
                    chances[begun + rest] += chance * continuation_probability(target, begun, rest)
    return chances


def _paths(draft: NextTokenTable, most: int, proposes: Proposes, path: Tokens = ()) -> Iterator[tuple[Tokens, float]]:
    """Yield all drafts that go on from `path`, and how probable each is from there."""
    if len(path) == most:
        yield path, 1.0
        return
    ends, row = 0.0, _row(draft, path)
    for token, chance in enumerate(row):
        if not proposes(row, token):
            ends += chance
        elif chance:
            yield from ((whole, chance * weight) for whole, weight in _paths(draft, most, proposes, (*path, token)))
    if ends:
        yield path, ends


def target_distribution(target: NextTokenTable, tokens: int) -> dict[Tokens, float]:
    """Return the distribution of `tokens` tokens without drafts."""
    outcomes = itertools.product(range(_size(target)), repeat=tokens)
    return {outcome: continuation_probability(target, (), outcome) for outcome in outcomes}


def continuation_probability(target: NextTokenTable, begun: Tokens, rest: Tokens) -> float:
    """Return the probability that the target continues with `rest`."""
    return math.prod(_row(target, (*begun, *rest[:i]))[rest[i]] for i in range(len(rest)))


def total_variation(found: Mapping[Tokens, float], wanted: Mapping[Tokens, float]) -> float:
    """Return the total variation distance of two distributions."""
    return 0.5 * sum(abs(found[outcome] - wanted[outcome]) for outcome in wanted)


def _size(table: NextTokenTable) -> int:
    return len(next(iter(table.values())))


def _row(table: NextTokenTable, begun: Tokens) -> Sequence[float]:
    """Return the distribution after `begun`, by the longest suffix of it that the table knows."""
    return next(table[begun[i:]] for i in range(len(begun) + 1) if begun[i:] in table)
