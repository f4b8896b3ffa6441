"""Compute the exact output distribution of an acceptance rule for drafts, by summing over every draft and every
verdict.

All probabilities are multiples of a quarter. So the ratio p / q of target to draft is a fraction with a denominator of
at most 4, and no acceptance threshold lies inside a twelfth of [0, 1): one random number from each twelfth represents
all numbers in it.
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
NextTokenTable = Mapping[Tokens, Sequence[float]]  # distribution of the next token by prefix, or by the last tokens
TargetRow = Callable[[int], Tensor]  # function of a draft position: the target's distribution there
AcceptanceRule = Callable[[Draft, TargetRow, list[float]], tuple[int, Tensor]]
Proposes = Callable[[Sequence[float], int], bool]  # (distribution, drawn token) -> whether the draft continues


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
        draft: the draft's distributions; None: a draft that always proposes token 0 with certainty.
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
    """Yield all drafts that continue `path`, each with its conditional probability."""
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
    """Return the target's distribution of its next `tokens` tokens, without drafts."""
    outcomes = itertools.product(range(_size(target)), repeat=tokens)
    return {outcome: continuation_probability(target, (), outcome) for outcome in outcomes}


def continuation_probability(target: NextTokenTable, begun: Tokens, rest: Tokens) -> float:
    """Return the probability that the target continues the tokens `begun` with `rest`."""
    return math.prod(_row(target, (*begun, *rest[:i]))[rest[i]] for i in range(len(rest)))


def total_variation(found: Mapping[Tokens, float], wanted: Mapping[Tokens, float]) -> float:
    """Return the total variation distance between two distributions."""
    return 0.5 * sum(abs(found[outcome] - wanted[outcome]) for outcome in wanted)


def _size(table: NextTokenTable) -> int:
    return len(next(iter(table.values())))


def _row(table: NextTokenTable, begun: Tokens) -> Sequence[float]:
    """Return the distribution after `begun`: the table's entry for its longest known suffix."""
    return next(table[begun[i:]] for i in range(len(begun) + 1) if begun[i:] in table)
