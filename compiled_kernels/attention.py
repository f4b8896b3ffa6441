"""Attention as every backend means it: masks, score functions, a layer's parameters, spans and pages; and the
specification, one span after another, each over its own context.

Masks are predicates over positions that broadcast. Score functions have the sense of flex_attention's (Dong et al.,
2024): given a score q k, already scaled and capped, its head and the positions of its query and key, what is put in its
place. Minus infinity hides the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.backends import BackendError, describe_callable

# Given query and key positions that broadcast: True where the query may look.
Mask = Callable[[Tensor, Tensor], Tensor]
# (score, head, query, key) -> score; the four broadcast, the result has the score's shape and type.
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Causal:
    """Every position up to the query's own."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query


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
class AndMask:
    """The keys that both masks show."""

    first: Mask
    second: Mask

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.first(query, key) & self.second(query, key)

    def __repr__(self) -> str:
        return f"Both({describe_callable(self.first)}, {describe_callable(self.second)})"


def window_and_sinks(mask: Mask, backend: str) -> tuple[int, int]:
    """Return (window, sinks) of a mask, 0 for no window: the form in which operations known to torch by a schema take
    masks.

    Raises BackendError for any other predicate: the backend cannot carry it out.
    """
    if isinstance(mask, Causal):
        return 0, 0
    if isinstance(mask, SlidingWindow):
        return mask.sliding_window, mask.num_sink_tokens
    raise BackendError(
        f"paged_attention: backend {backend} knows causal masks with window and sinks, not {describe_callable(mask)}"
    )


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


class AttentionParameters(NamedTuple):
    """A layer's attention, as a rule over scores.

    Attributes:
        scale: factor of the scores.
        mask: predicate over (query, key) positions.
        softcap: c > 0 makes every score c tanh(score / c) (Gemma 2, 2024).
        sink_logits: one logit a head in the softmax's sum that attends to nothing (gpt-oss, 2025).
        score: changes each score after the cap.
    """

    scale: float
    mask: Mask = Causal()
    softcap: float = 0.0
    sink_logits: Float[Tensor, " head"] | None = None
    score: Score | None = None

    def window_and_sinks(self, operator: str, backend: str) -> tuple[int, int]:
        """Return (window, sinks) of the mask for a kernel written by hand. Raises BackendError for any other mask, and
        for score functions: the kernel cannot carry them out."""
        if self.score is not None:
            words = f"backend {backend} knows no score functions, not {describe_callable(self.score)}"
            raise BackendError(f"{operator}: {words}")
        return window_and_sinks(self.mask, backend)


class Spans(NamedTuple):
    """The spans of a step, packed: sequence s owns the rows [starts[s], starts[s + 1]), the last of its
    `context_lengths[s]` positions. `decode_only` promises that every span has one token."""

    starts: Int[Tensor, " seq_plus_one"]
    context_lengths: Int[Tensor, " seq"]
    decode_only: bool = False

    def listed(self) -> list[tuple[int, slice, int]]:
        """Return (sequence, its rows, its context length) of each span."""
        starts, lengths = self.starts.tolist(), self.context_lengths.tolist()
        return [(seq, slice(starts[seq], starts[seq + 1]), context) for seq, context in enumerate(lengths)]

    def decodes_and_longer(self) -> tuple[int, list[tuple[int, slice, int]]]:
        """Return how many spans of one token come first, and the other spans, but for empty ones."""
        listed = self.listed()
        decodes = next((seq for seq, rows, _ in listed if rows.stop - rows.start != 1), len(listed))
        return decodes, [span for span in listed[decodes:] if span[1].start < span[1].stop]


class SpanContext(NamedTuple):
    """The keys and values that one span's queries read [read, kv_head, dim], the positions of the queries [token, 1]
    and of what is read [read], and where not every query reads all of it, which does [token, read]."""

    k: Tensor
    v: Tensor
    queries: Tensor
    positions: Tensor
    readable: Tensor | None = None

    @classmethod
    def whole(cls, k: Tensor, v: Tensor, tokens: int) -> SpanContext:
        """Return what the last `tokens` positions read of all keys and values up to their own."""
        positions = torch.arange(len(k), device=k.device)
        return cls(k, v, positions[len(k) - tokens :, None], positions)

    def allowed(self, mask: Mask) -> Tensor:
        """Return which queries see what: [token, read]."""
        seen = mask(self.queries, self.positions)
        return seen if self.readable is None else seen & self.readable


class KVPages(Protocol):
    """Keys and values in pages, of one format."""

    @property
    def flat(self) -> tuple[Any, ...]:
        """Return the tensors and numbers, as the operator's schema lists them."""
        ...

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Return the page tables [seq, held]."""
        ...

    def first(self, seqs: int) -> Self:
        """Return the same pages, with page tables of the first sequences only."""
        ...

    def gather(self, seq: int, context: int, tokens: int, dtype: torch.dtype | None = None) -> SpanContext:
        """Gather what the last `tokens` of the `context` positions of a sequence may read; converted from codes to
        `dtype`, to float32 at the least unless given."""
        ...

    def blocks(self, lengths: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the pages of every sequence whole, for queries at the end of their contexts: keys and values
        [seq, page, kv_head, offset, dim], positions and whether the query reads them [seq, page, offset]."""
        ...


def attention_reference(q: Tensor, kv: KVPages, spans: Spans, parameters: AttentionParameters) -> Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for seq, rows, context in spans.listed():
        if rows.start < rows.stop:
            out[rows] = attend(q[rows], kv.gather(seq, context, rows.stop - rows.start), parameters)
    return out


def attend(q: Tensor, context: SpanContext, parameters: AttentionParameters) -> Tensor:
    """Attend with q [token, head, dim] over the span's context; a query that sees no key gives zeros."""
    weights = attention_weights(q, context, parameters)
    values = context.v.to(weights.dtype)
    if context.readable is not None:  # what no query may see may be anything, and 0 x NaN is NaN
        values = torch.where(context.allowed(parameters.mask).any(0)[:, None, None], values, 0.0)
    mixed = einsum(weights, values, "group share token read, read group dim -> token group share dim")
    return rearrange(mixed, "token group share dim -> token (group share) dim").to(q.dtype)


def attention_weights(q: Tensor, context: SpanContext, parameters: AttentionParameters) -> Tensor:
    """Return the weight of each key for each query: [kv_head, queries_per_kv, token, read], in float32 or q's
    float64."""
    scale, mask, softcap, sink_logits, score = parameters
    k, groups = context.k, context.k.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = rearrange(q.to(exact), "token (group share) dim -> group share token dim", group=groups)
    scores = einsum(grouped, k.to(exact), "group share token dim, read group dim -> group share token read") * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if score is not None:
        heads = torch.arange(q.shape[1], device=q.device).view(groups, -1, 1, 1)  # group share 1 1
        scores = score(scores, heads, context.queries, context.positions)
    scores = torch.where(context.allowed(mask), scores, -torch.inf)
    seen = (scores != -torch.inf).any(-1, keepdim=True)
    if sink_logits is not None:
        sink = rearrange(sink_logits.to(exact), "(group share) -> group share 1 1", group=groups)
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    # Nowhere to look is 0 / 0 in the softmax; a NaN that came in must stay one.
    return torch.where(seen, torch.softmax(scores, dim=-1)[..., : len(k)], 0.0)
