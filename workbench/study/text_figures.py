"""Statistics of a text: repetition, and surprisal under a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_LOOP_TOKENS = 64  # maximum tokens of a loop's period
MIN_LOOP_REPEATS = 3  # repeats of a period that make a loop
MIN_LOOP_SPAN = 12  # minimum tokens of these repeats together


def distinct_ngram_fraction(ids: Sequence[int], n: int) -> float:
    """Return the fraction of a text's n-grams that are distinct (Li et al., 2016)."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams)


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Return whether a period of at most `MAX_LOOP_TOKENS` tokens repeats at the end of the text."""
    for period in range(1, min(MAX_LOOP_TOKENS, len(ids) // MIN_LOOP_REPEATS) + 1):
        turns = max(MIN_LOOP_REPEATS, -(-MIN_LOOP_SPAN // period))
        end = list(ids[-period * turns :])
        if len(end) == period * turns and end == end[-period:] * turns:
            return True
    return False


def token_surprisal(logits: Tensor, ids: Sequence[int]) -> tuple[float, float, float]:
    """Return surprisal statistics of a text's tokens.

    Args:
        logits: Logits of the position before each token, [token, vocab].
        ids: The tokens.

    Returns:
        The total bits of the tokens, the mean entropy of the distributions in bits, and the fraction of most likely
        tokens.
    """
    logp = logits.double().log_softmax(-1)
    tokens = torch.tensor(ids)
    bits = -float(logp.gather(-1, tokens[:, None]).sum()) / math.log(2)
    return bits, entropy(logits), float((logp.argmax(-1) == tokens).double().mean())


def entropy(logits: Tensor) -> float:
    """Return the mean entropy of the rows' distributions in bits."""
    p = logits.double().softmax(-1)
    return float(-torch.special.xlogy(p, p).sum(-1).mean()) / math.log(2)
