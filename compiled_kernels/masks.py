"""Masks and score functions.

Masks are predicates over positions that broadcast; one that shows heads different keys is a `HeadMask`. Score functions
have the sense of flex_attention's (Dong et al., 2024): given a score q k, already scaled and capped, its head and the
positions of its query and key, what is put in its place. Minus infinity hides the key. A score function with an
attribute `normalized` that is False gives the logarithm of the weight itself, which no softmax divides (sigmoid
attention, Ramapuram et al. 2024).
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
    """Every position up to the query's own."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query


CAUSAL = Causal()


@dataclass(frozen=True)
class SlidingWindow:
    """The last `sliding_window` positions, the query's own included (Mistral, Beltagy et al. 2020), and the first
    `num_sink_tokens` positions of the text (StreamingLLM, Xiao et al. 2023)."""

    sliding_window: int
    num_sink_tokens: int = 0

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((key > query - self.sliding_window) | (key < self.num_sink_tokens))


@dataclass(frozen=True)
class Chunked:
    """The past within the query's own chunk of `chunk_size` positions (Llama 4)."""

    chunk_size: int

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // self.chunk_size == query // self.chunk_size)


@dataclass(frozen=True)
class HeadMask:
    """A mask that shows heads different keys: `shown(query, key, head)`, for the `heads` heads from number `first` on.

    Called as other masks are, it shows what any of them sees.
    """

    shown: Callable[[Tensor, Tensor, Tensor], Tensor]
    heads: int
    first: int = 0

    def of_head(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        """Return what heads see, counted from 0; the three broadcast."""
        return self.shown(query, key, head + self.first)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        heads = torch.arange(self.heads, device=query.device)
        return self.of_head(query[..., None], key[..., None], heads).any(-1)


@dataclass(frozen=True)
class AndMask:
    """The keys that both masks show."""

    first: Mask
    second: Mask

    def of_head(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        """Return what heads see; the three broadcast."""
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
    """Return which keys a mask shows to queries of these heads; the three broadcast, and the result may leave out the
    heads where they see the same."""
    return mask.of_head(query, key, head) if isinstance(mask, HeadMask | AndMask) else mask(query, key)


def is_normalized(score: Score | None) -> bool:
    """Return whether a softmax divides the weights of these scores."""
    return getattr(score, "normalized", True)


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
class ScoreTemperature:
    """A factor of late queries' scores: 1 + `strength` log(1 + floor((query + `offset`) / `floor`)) (Llama 4)."""

    strength: float
    floor: int
    offset: int = 0

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        steps = ((query + self.offset) // self.floor).to(score.dtype)
        return score * (1 + self.strength * torch.log1p(steps))


@dataclass(frozen=True)
class ChainedScore:
    """One score function after another: `second` of what `first` gives."""

    first: Score
    second: Score

    @property
    def normalized(self) -> bool:
        return is_normalized(self.second)

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.second(self.first(score, head, query, key), head, query, key)

    def __repr__(self) -> str:
        return f"Then({describe_callable(self.first)}, {describe_callable(self.second)})"
