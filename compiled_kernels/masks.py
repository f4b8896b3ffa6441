"""Define masks and score functions of attention.

A mask is a predicate over positions that broadcast; a mask with different keys for different heads is a `HeadMask`. A
score function is defined as in flex_attention (Dong et al., 2024): from a score q k, already scaled and capped, its
head, and the positions of query and key, it returns the new score. Minus infinity hides the key. If a score function
has an attribute `normalized` that is False, it returns the logarithm of the weight itself, which no softmax divides
(attention by a sigmoid, Ramapuram et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_kernels.backends import describe_callable

# Given query and key positions that broadcast: True where the query may look.
Mask = Callable[[Tensor, Tensor], Tensor]
# (score, head, query, key) -> score; the four broadcast, the result has the score's shape and type.
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Causal:
    """Show every position up to the query's own."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query


CAUSAL = Causal()


@dataclass(frozen=True)
class SlidingWindow:
    """Show the last `sliding_window` positions, including the query's own (Mistral, Beltagy et al. 2020), and the first
    `num_sink_tokens` positions of the text (StreamingLLM, Xiao et al. 2023)."""

    sliding_window: int
    num_sink_tokens: int = 0

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((key > query - self.sliding_window) | (key < self.num_sink_tokens))


@dataclass(frozen=True)
class Chunked:
    """Show earlier positions within the query's own chunk of `chunk_size` positions (Llama 4)."""

    chunk_size: int

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // self.chunk_size == query // self.chunk_size)


@dataclass(frozen=True)
class HeadMask:
    """A mask whose visible keys differ between heads: `shown(query, key, head)` for `heads` heads, numbered from
    `first`.

    Called like other masks, it shows a key if any of the heads sees it.
    """

    shown: Callable[[Tensor, Tensor, Tensor], Tensor]
    heads: int
    first: int = 0

    def of_head(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        """Return a boolean for each query, key and head: whether the head sees the key. Heads are counted from 0; the
        three arguments broadcast.
        """
        return self.shown(query, key, head + self.first)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        heads = torch.arange(self.heads, device=query.device)
        return self.of_head(query[..., None], key[..., None], heads).any(-1)


@dataclass(frozen=True)
class AndMask:
    """Show the keys that both masks show."""

    first: Mask
    second: Mask

    def of_head(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        """Return a boolean for each query, key and head: whether the head sees the key; the three arguments
        broadcast.
        """
        return seen_by_head(self.first, query, key, head) & seen_by_head(self.second, query, key, head)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.first(query, key) & self.second(query, key)

    def __repr__(self) -> str:
        return f"Both({describe_callable(self.first)}, {describe_callable(self.second)})"


def differs_by_head(mask: Mask) -> bool:
    """Return whether heads see different keys."""
    if isinstance(mask, AndMask):
        return differs_by_head(mask.first) or differs_by_head(mask.second)
    return isinstance(mask, HeadMask)


def seen_by_head(mask: Mask, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
    """Return a boolean for each query, key and head: whether the mask shows the key. The three arguments broadcast; the
    result may omit the head axis if all heads see the same keys."""
    return mask.of_head(query, key, head) if isinstance(mask, HeadMask | AndMask) else mask(query, key)


def is_normalized(score: Score | None) -> bool:
    """Return whether a softmax divides the weights that result from this score function."""
    return getattr(score, "normalized", True)


@dataclass(frozen=True)
class ALiBi:
    """Lower each head's score in proportion to the distance between query and key, by a slope of its own (ALiBi, Press
    et al., 2022).

    The slopes of n heads, n a power of two, are 2^(-8/n), 2^(-16/n), ... If n is not a power of two, the heads beyond
    the next lower power p take every other slope of 2p heads, beginning with the first, as in the authors' code.
    """

    heads: int

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        power = 1 << int(math.log2(self.heads))
        at = head.to(score.dtype)
        exponent = torch.where(head < power, (at + 1) * (8 / power), (2 * (at - power) + 1) * (4 / power))
        return score - torch.exp2(-exponent) * (query - key).to(score.dtype)


@dataclass(frozen=True)
class ScoreTemperature:
    """Multiply late queries' scores by 1 + `strength` log(1 + floor((query + `offset`) / `floor`)) (Llama 4)."""

    strength: float
    floor: int
    offset: int = 0

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        steps = ((query + self.offset) // self.floor).to(score.dtype)
        return score * (1 + self.strength * torch.log1p(steps))


@dataclass(frozen=True)
class ChainedScore:
    """Apply score function `second` to the result of `first`."""

    first: Score
    second: Score

    @property
    def normalized(self) -> bool:
        return is_normalized(self.second)

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.second(self.first(score, head, query, key), head, query, key)

    def __repr__(self) -> str:
        return f"Then({describe_callable(self.first)}, {describe_callable(self.second)})"
