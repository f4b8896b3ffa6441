"""Score functions, applied before the softmax: over heads and positions that broadcast.

The sense is flex_attention's (Dong et al., 2024): given a score q k, already scaled and capped, its head and the
positions of its query and key, what is put in its place. Minus infinity hides the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError, describe_callable

# (score, head, query, key) -> score; the four broadcast, the result has the score's shape and type.
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ALiBi:
    """ALiBi: each head's score falls by its slope for every token between key and query (Press et al., 2022).

    The slopes of n heads, n a power of two, are 2^(-8/n), 2^(-16/n), ...; where it is none, the heads beyond the next
    lower power p take every other slope of 2p heads, from the first on, as in the authors' code.
    """

    heads: int

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        power = 1 << int(math.log2(self.heads))
        at = head.to(score.dtype)
        exponent = torch.where(head < power, (at + 1) * (8 / power), (2 * (at - power) + 1) * (4 / power))
        return score - torch.exp2(-exponent) * (query - key).to(score.dtype)


@dataclass(frozen=True)
class ChainedScore:
    """One score function after another: `second` of what `first` gives."""

    first: Score
    second: Score

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.second(self.first(score, head, query, key), head, query, key)

    def __repr__(self) -> str:
        return f"Then({describe_callable(self.first)}, {describe_callable(self.second)})"


def uses_alibi(score: Score | None, backend: str) -> bool:
    """Return whether scores fall as in ALiBi: the form in which operations known to torch by a schema take a score
    function. Raises BackendError for any other: the backend cannot carry it out."""
    if score is None or isinstance(score, ALiBi):
        return score is not None
    raise BackendError(
        f"paged_attention: backend {backend} knows no score functions but ALiBi, not {describe_callable(score)}"
    )
