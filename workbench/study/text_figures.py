"""What can be counted of a text: how much of it repeats, and how surprising it is to a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LONGEST = 64  # tokens of a loop
TURNS = 3  # a text ends in a loop where its end stands so many times in a row
LEAST = 12  # tokens that these turns have together, at the least


def distinct(ids: Sequence[int], n: int) -> float:
    """Share of a text's n-grams that are different ones (Li et al., 2016)."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams)


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Whether a stretch of at most `LONGEST` tokens stands at the end again and again."""
    for period in range(1, min(LONGEST, len(ids) // TURNS) + 1):
        turns = max(TURNS, -(-LEAST // period))
        end = list(ids[-period * turns :])
        if len(end) == period * turns and end == end[-period:] * turns:
            return True
    return False


def surprise(logits: Tensor, ids: Sequence[int]) -> tuple[float, float, float]:
    """Of a text's tokens under logits [token, vocab] of the places before them: their bits in all, the entropy of the
    distributions in bits a token, and the share that is the most likely one."""
    logp = logits.double().log_softmax(-1)
    tokens = torch.tensor(ids)
    bits = -float(logp.gather(-1, tokens[:, None]).sum()) / math.log(2)
    return bits, entropy(logits), float((logp.argmax(-1) == tokens).double().mean())


def entropy(logits: Tensor) -> float:
    """Bits a row, in the mean."""
    p = logits.double().softmax(-1)
    return float(-torch.special.xlogy(p, p).sum(-1).mean()) / math.log(2)
