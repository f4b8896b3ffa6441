"""Define attention for all backends: a layer's parameters, the spans of a step, the pages of keys and values, and the
specification, which computes one span after another.
"""

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
    """The parameters of a layer's attention: how the scores of a query and the keys become weights.

    Attributes:
        scale: factor of the scores.
        mask: predicate over (query, key) positions.
        softcap: c > 0 makes every score c tanh(score / c) (Gemma 2, 2024).
        sink_logits: one logit per head, added to the softmax's sum without a value (gpt-oss, 2025).
        score: function that changes each score after the cap.
        rules: mask and score function in the kernels' form, if already known: they cannot be traced within a graph.
        selection: rule by which each query selects pages, for a cache with page summaries; default: all pages.
    """

    scale: float
    mask: Mask = Causal()
    softcap: float = 0.0
    sink_logits: Float[Tensor, " head"] | None = None
    score: Score | None = None
    rules: AttentionRules | None = None
    selection: PageSelection | None = None

    def kernel_rules(self, operator: str, backend: str) -> AttentionRules:
        """Return the mask and the score function in the form that kernels read. Raises BackendError if that is
        unsupported.
        """
        return self.rules or rules_of(self.mask, self.score, operator, backend)


class Spans(NamedTuple):
    """The packed spans of a step. A span is the run of tokens that the step computes for one sequence: sequence s has
    the rows [starts[s], starts[s + 1]), the last of its `context_lengths[s]` positions. If `decode_only`, every span
    has one token.

    If spans may be trees, `parents` has for each token the row of its parent within the span, -1 for the first; a token
    sees its ancestors in the span, and its position counts them. Only the reference supports trees.
    """

    starts: Int[Tensor, " seq_plus_one"]
    context_lengths: Int[Tensor, " seq"]
    decode_only: bool = False
    parents: Int[Tensor, " token"] | None = None

    def listed(self) -> list[tuple[int, slice, int]]:
        """Return (sequence, rows, context length) of each span."""
        starts, lengths = self.starts.tolist(), self.context_lengths.tolist()
        return [(seq, slice(starts[seq], starts[seq + 1]), context) for seq, context in enumerate(lengths)]

    def decodes_and_longer(self) -> tuple[int, list[tuple[int, slice, int]]]:
        """Return the number of leading spans with one token, and a list (see `listed`) of the nonempty spans after
        them.
        """
        listed = self.listed()
        decodes = next((seq for seq, rows, _ in listed if rows.stop - rows.start != 1), len(listed))
        return decodes, [span for span in listed[decodes:] if span[1].start < span[1].stop]


class SpanContext(NamedTuple):
    """The keys and values that one span's queries read [read, kv_head, dim], with the positions of the queries [token,
    1] and of the keys [read]. `readable` is true where a query may read a key: [token, read], or [kv_head, 1, token,
    read] if each key/value head selects pages. None: every query reads all keys.
    """

    k: Tensor
    v: Tensor
    queries: Tensor
    positions: Tensor
    readable: Tensor | None = None
    chosen: Tensor | None = None

    @classmethod
    def whole(cls, k: Tensor, v: Tensor, tokens: int) -> SpanContext:
        """Return the context of a span: it is the last `tokens` positions of a sequence and reads all its keys and
        values.
        """
        positions = torch.arange(len(k), device=k.device)
        return cls(k, v, positions[len(k) - tokens :, None], positions)

    def allowed(self, mask: Mask) -> Tensor:
        """Return a boolean for each query and key: whether the query sees the key [token, read]. If heads differ, true
        if any head sees it.
        """
        seen = mask(self.queries, self.positions)
        return seen if self.readable is None else seen & self.readable

    def allowed_to(self, mask: Mask, heads: Tensor) -> Tensor:
        """Return a boolean for each query and key: whether the heads `heads` [..., 1, 1] see the key. Its shape is
        [..., token, read], without the leading axes if the heads do not differ.
        """
        seen = seen_by_head(mask, self.queries, self.positions, heads)
        seen = seen if self.readable is None else seen & self.readable
        return seen if self.chosen is None else seen & self.chosen


class KVPages(Protocol):
    """Keys and values in pages: the interface that each storage format implements."""

    @property
    def flat(self) -> tuple[Any, ...]:
        """Return these pages as the tensors and numbers that the operator's schema lists, in its order."""
        ...

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Return the page tables: the numbers of each sequence's pages [seq, held page]."""
        ...

    @property
    def chosen(self) -> Tensor | None:
        """Return a boolean for each query and page of its sequence: whether the query reads the page [token, kv_head,
        held page]. None if queries read all pages.
        """
        ...

    def first(self, seqs: int) -> Self:
        """Return the same pages, with the page tables of only the first `seqs` sequences."""
        ...

    def gather(
        self, seq: int, context: int, rows: slice, dtype: torch.dtype | None = None, mask: Mask = CAUSAL
    ) -> SpanContext:
        """Gather the keys and values that the queries in `rows` may read. These queries are the last positions of a
        sequence of `context` positions. Codes are converted to `dtype` (default: float32 or wider). Pages that `mask`
        hides from all queries, or that no query selected, are left out.
        """
        ...

    def blocks(self, lengths: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the contents of every sequence's pages, one tuple for each page table: keys and values [seq, page,
        kv_head, offset, dim]; their positions, and whether the sequence's last position reads them [seq, page, offset].
        """
        ...

    @property
    def layout(self) -> tuple[Any, ...]:
        """Return the values that, with page tables and lengths, determine the positions in `blocks`. The first value is
        the page size.
        """
        ...

    def with_pages(self, pages: Tensor, places: Tensor) -> Self:
        """Return the same pages with a shorter first page table: it lists only `pages` [seq, kept page], which stand at
        the indices `places` of the full table.
        """
        ...


def shown_pages(mask: Mask, context: int, tokens: int, size: int, device: torch.device) -> Tensor | None:
    """Return the indices of a context's pages with a key that one of the last `tokens` queries sees; None if all pages
    have one.
    """
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
            else:  # positions differ from slots, so no page is left out
                read = along_tree(kv.gather(seq, context, rows), spans.parents[rows])
            out[rows] = attend(q[rows], read, parameters)
    return out


def along_tree(read: SpanContext, parents: Tensor) -> SpanContext:
    """Restrict a span's context to a tree of tokens. `parents` [token] is the row of each token's parent; the last keys
    are the span's own. A token's position is one more than its parent's, and within the span it sees only its ancestors
    and itself.
    """
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
    """Compute attention of q [token, head, dim] over the span's context; a query that sees no key gets zeros."""
    weights = attention_weights(q, context, parameters)
    values = context.v.to(weights.dtype)
    if context.readable is not None:  # unseen values may be NaN, and 0 x NaN is NaN
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
    # A query that sees no key gives 0 / 0 in the softmax; a NaN in the inputs must stay NaN.
    return torch.where(seen, torch.softmax(scores, dim=-1)[..., : len(k)], 0.0)
