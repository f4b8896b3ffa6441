"""The specification: one span after another, each over its own context."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, Mask, Spans


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


class PagedKV(NamedTuple):
    """Keys and values in pages. Position p of sequence s lies in page `page_table[s, p // offset]`; page 0 is null."""

    keys: Float[Tensor, "page group offset dim"]
    values: Float[Tensor, "page group offset dim"]
    page_table: Int[Tensor, "seq held"]

    @property
    def flat(self) -> tuple[Tensor, ...]:
        return tuple(self)

    @classmethod
    def unflat(cls, *flat: Tensor) -> PagedKV:
        return cls(*flat)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (self.page_table,)

    def first(self, seqs: int) -> PagedKV:
        return self._replace(page_table=self.page_table[:seqs])

    def gather(self, seq: int, context: int, tokens: int, dtype: torch.dtype | None = None) -> SpanContext:
        k, v = (gather_context(pages, self.page_table[seq], context) for pages in (self.keys, self.values))
        return SpanContext.whole(k, v, tokens)

    def blocks(self, lengths: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        table, size = self.page_table.long(), self.keys.shape[2]
        positions = torch.arange(table.shape[1] * size, device=table.device).view(1, -1, size)
        return [(self.keys[table].to(dtype), self.values[table].to(dtype), positions, positions < lengths)]


def reference(q: Tensor, kv: KVPages, spans: Spans, parameters: AttentionParameters) -> Tensor:
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


def gather_context(pages: Tensor, table: Tensor, context: int) -> Tensor:
    """Return the first `context` positions of one sequence, in order: [context, kv_head, dim]; zeros for
    freed pages."""
    size = pages.shape[2]
    held = table[: -(-context // size)].long()
    used = pages[held]
    used[held == 0] = 0  # a weight of 0 does not help against NaN
    return rearrange(used, "page group offset dim -> (page offset) group dim")[:context]
