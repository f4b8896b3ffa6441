"""Attention as every backend means it: a layer's parameters, spans and pages; and the specification, one span after
another, each over its own context."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.attention_rules import AttentionRules, rules_of
from compiled_kernels.masks import CAUSAL, Causal, Mask, Score, is_normalized, seen_by_head
from compiled_kernels.page_selection.selection import PageSelection


class AttentionParameters(NamedTuple):
    """A layer's attention, as a rule over scores.

    Attributes:
        scale: factor of the scores.
        mask: predicate over (query, key) positions.
        softcap: c > 0 makes every score c tanh(score / c) (Gemma 2, 2024).
        sink_logits: one logit a head in the softmax's sum that attends to nothing (gpt-oss, 2025).
        score: changes each score after the cap.
        rules: mask and score function as kernels take them, where they are known already: a graph cannot trace them.
        selection: which pages each query reads, for the cache that has their summaries; all unless given.
    """

    scale: float
    mask: Mask = Causal()
    softcap: float = 0.0
    sink_logits: Float[Tensor, " head"] | None = None
    score: Score | None = None
    rules: AttentionRules | None = None
    selection: PageSelection | None = None

    def kernel_rules(self, operator: str, backend: str) -> AttentionRules:
        """Return mask and score function as a kernel takes them. Raises BackendError for what it cannot take."""
        return self.rules or rules_of(self.mask, self.score, operator, backend)


class Spans(NamedTuple):
    """The spans of a step, packed: sequence s owns the rows [starts[s], starts[s + 1]), the last of its
    `context_lengths[s]` positions. `decode_only` promises that every span has one token.

    Where spans may be trees, `parents` is the row in its span of the token before each token, -1 for the first; a token
    sees its ancestors in the span, and its position counts them. Only the reference carries that out."""

    starts: Int[Tensor, " seq_plus_one"]
    context_lengths: Int[Tensor, " seq"]
    decode_only: bool = False
    parents: Int[Tensor, " token"] | None = None

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
    and of what is read [read], and where not every query reads all of it, which does [token, read]; where pages were
    chosen for each key/value head, which of them [kv_head, 1, token, read]."""

    k: Tensor
    v: Tensor
    queries: Tensor
    positions: Tensor
    readable: Tensor | None = None
    chosen: Tensor | None = None

    @classmethod
    def whole(cls, k: Tensor, v: Tensor, tokens: int) -> SpanContext:
        """Return what the last `tokens` positions read of all keys and values up to their own."""
        positions = torch.arange(len(k), device=k.device)
        return cls(k, v, positions[len(k) - tokens :, None], positions)

    def allowed(self, mask: Mask) -> Tensor:
        """Return which queries see what: [token, read]; where heads differ, what one of them sees."""
        seen = mask(self.queries, self.positions)
        return seen if self.readable is None else seen & self.readable

    def allowed_to(self, mask: Mask, heads: Tensor) -> Tensor:
        """Return which queries of `heads` [..., 1, 1] see what: [..., token, read], or without the leading axes where
        all heads see the same."""
        seen = seen_by_head(mask, self.queries, self.positions, heads)
        seen = seen if self.readable is None else seen & self.readable
        return seen if self.chosen is None else seen & self.chosen


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

    @property
    def chosen(self) -> Tensor | None:
        """Return which pages of its sequence each query reads [token, kv_head, held]; None for all."""
        ...

    def first(self, seqs: int) -> Self:
        """Return the same pages, with page tables of the first sequences only."""
        ...

    def gather(
        self, seq: int, context: int, rows: slice, dtype: torch.dtype | None = None, mask: Mask = CAUSAL
    ) -> SpanContext:
        """Gather what the queries in `rows`, the last of the `context` positions of a sequence, may read; converted
        from codes to `dtype`, to float32 at the least unless given. Pages that `mask` hides from all of them, or that
        none has chosen, are left out."""
        ...

    def blocks(self, lengths: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the pages of every sequence whole, for queries at the end of their contexts: keys and values
        [seq, page, kv_head, offset, dim], positions and whether the query reads them [seq, page, offset]."""
        ...

    @property
    def layout(self) -> tuple[Any, ...]:
        """Return what decides, beside tables and lengths, which positions `blocks` has: first the page size."""
        ...

    def with_pages(self, pages: Tensor, places: Tensor) -> Self:
        """Return the same pages, of which the first table lists only `pages` [seq, few], those of `places` in it."""
        ...


def shown_pages(mask: Mask, context: int, tokens: int, size: int, device: torch.device) -> Tensor | None:
    """Return which pages of a context hold a key that one of the last `tokens` queries sees; None for all of them."""
    if isinstance(mask, Causal):
        return None
    at = torch.arange(context, device=device)
    seen = mask(at[context - tokens :, None], at[None]).expand(tokens, context).any(0)
    pages = torch.nn.functional.pad(seen, (0, -context % size)).view(-1, size).any(1)
    return None if bool(pages.all()) else pages.nonzero()[:, 0]


def attention_reference(q: Tensor, kv: KVPages, spans: Spans, parameters: AttentionParameters) -> Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for seq, rows, context in spans.listed():
        if rows.start < rows.stop:
            if spans.parents is None:
                read = kv.gather(seq, context, rows, mask=parameters.mask)
            else:  # positions are not those of the slots, so no page is left out
                read = along_tree(kv.gather(seq, context, rows), spans.parents[rows])
            out[rows] = attend(q[rows], read, parameters)
    return out


def along_tree(read: SpanContext, parents: Tensor) -> SpanContext:
    """Return what the queries of a span read, the last keys being its own, where the token before each is the row
    `parents` [token] of the span: a token's position is one more than its parent's, and it sees no token of the span
    but its ancestors and itself."""
    tokens = len(parents)
    start = len(read.k) - tokens
    sees = torch.eye(tokens, dtype=torch.bool, device=parents.device)
    for row, parent in enumerate(parents.tolist()):
        if parent >= 0:
            sees[row] |= sees[parent]
    positions = torch.cat([read.positions[:start], read.positions[start] + sees.sum(-1) - 1])
    readable = torch.cat([sees.new_ones(tokens, start), sees], dim=1)
    readable = readable if read.readable is None else readable & read.readable
    return read._replace(queries=positions[start:, None], positions=positions, readable=readable)


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
    scale, mask, softcap, sink_logits, score, *_ = parameters
    k, groups = context.k, context.k.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = rearrange(q.to(exact), "token (group share) dim -> group share token dim", group=groups)
    scores = einsum(grouped, k.to(exact), "group share token dim, read group dim -> group share token read") * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    heads = torch.arange(q.shape[1], device=q.device).view(groups, -1, 1, 1)  # group share 1 1
    if score is not None:
        scores = score(scores, heads, context.queries, context.positions)
    scores = torch.where(context.allowed_to(mask, heads), scores, -torch.inf)
    if not is_normalized(score):
        return scores.exp()
    seen = (scores != -torch.inf).any(-1, keepdim=True)
    if sink_logits is not None:
        sink = rearrange(sink_logits.to(exact), "(group share) -> group share 1 1", group=groups)
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    # Nowhere to look is 0 / 0 in the softmax; a NaN that came in must stay one.
    return torch.where(seen, torch.softmax(scores, dim=-1)[..., : len(k)], 0.0)
