"""Compute attention of packed spans over keys and values in pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compiled_kernels.attention import (
    AttentionParameters,
    KVPages,
    SpanContext,
    Spans,
    attention_reference,
    shown_pages,
)
from compiled_kernels.attention_rules import AttentionRules, rules_of
from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.masks import CAUSAL, Causal, Mask, Score, SlidingWindow
from compiled_kernels.operators import Operator, define_operator
from compiled_kernels.paged_attention.inductor import by_spans, decode_attention

# Arguments after an operator's own tensors; graphs can hold only flat tensors and numbers.
SCHEMA = (
    "Tensor span_starts, Tensor context_lengths, bool decode_only,"
    " float scale, float softcap, Tensor? sink_logits, int window, int sinks, str mask, str score,"
    " bool normalized"
)


class PagedKV(NamedTuple):
    """Keys and values in pages. Position p of sequence s lies in page `page_table[s, p // offset]`; page 0 is null. If
    the table lists only some pages, its column c is page `places[s, c]` of the sequence. `chosen` marks the columns
    that each query reads, its own page always included (see `page_selection`); None: all columns."""

    keys: Float[Tensor, "page group offset dim"]
    values: Float[Tensor, "page group offset dim"]
    page_table: Int[Tensor, "seq held"]
    places: Int[Tensor, "seq held"] | None = None
    chosen: Bool[Tensor, "token group held"] | None = None

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        assert self.places is None
        return self.keys, self.values, self.page_table, self.chosen

    @classmethod
    def unflat(cls, keys: Tensor, values: Tensor, page_table: Tensor, chosen: Tensor | None) -> PagedKV:
        return cls(keys, values, page_table, chosen=chosen)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (self.page_table,)

    def first(self, seqs: int) -> PagedKV:
        """Return the same pages for the first `seqs` sequences only, each with one query."""
        chosen = None if self.chosen is None else self.chosen[:seqs]
        return self._replace(page_table=self.page_table[:seqs], chosen=chosen)

    def gather(
        self, seq: int, context: int, rows: slice, dtype: torch.dtype | None = None, mask: Mask = CAUSAL
    ) -> SpanContext:
        size, table, tokens = self.keys.shape[2], self.page_table[seq], rows.stop - rows.start
        shown = shown_pages(mask, context, tokens, size, table.device)
        if shown is None and self.chosen is None:
            k, v = (gather_context(pages, table, context) for pages in (self.keys, self.values))
            return SpanContext.whole(k, v, tokens)
        shown = torch.arange(-(-context // size), device=table.device) if shown is None else shown
        chosen = None
        if self.chosen is not None:
            chosen = self.chosen[rows]
            shown = shown[chosen.flatten(0, 1).any(0)[shown]]
        positions = (shown[:, None] * size + torch.arange(size, device=table.device)).flatten()
        known = int((positions < context).sum())
        positions = positions[:known]
        k, v = (gather_context(pages, table[shown], known) for pages in (self.keys, self.values))
        if chosen is not None:
            chosen = rearrange(chosen[:, :, positions // size], "token group read -> group 1 token read")
        queries = torch.arange(context - tokens, context, device=table.device)[:, None]
        return SpanContext(k, v, queries, positions, chosen=chosen)

    def blocks(self, lengths: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        table, size = self.page_table.long(), self.keys.shape[2]
        places = torch.arange(table.shape[1], device=table.device)[None] if self.places is None else self.places
        positions = places[..., None] * size + torch.arange(size, device=table.device)
        return [(self.keys[table].to(dtype), self.values[table].to(dtype), positions, positions < lengths)]

    @property
    def layout(self) -> tuple[int]:
        return (self.keys.shape[2],)

    def with_pages(self, pages: Tensor, places: Tensor) -> PagedKV:
        chosen = None
        if self.chosen is not None:  # an entry beyond the table only pads the row
            held = self.chosen.shape[2]
            chosen = self.chosen.gather(2, places.clamp(max=held - 1)[:, None].expand(-1, self.chosen.shape[1], -1))
            chosen = chosen & (places < held)[:, None]
        return self._replace(page_table=pages, places=places, chosen=chosen)


def gather_context(pages: Tensor, table: Tensor, context: int) -> Tensor:
    """Return the keys or values at the first `context` positions of one sequence, in order [context, kv_head, dim];
    positions in freed pages are zero."""
    size = pages.shape[2]
    held = table[: -(-context // size)].long()
    used = pages[held]
    used[held == 0] = 0  # a weight of 0 would not remove a NaN
    return rearrange(used, "page group offset dim -> (page offset) group dim")[:context]


def flatten(spans: Spans, parameters: AttentionParameters, operator: str, backend: str) -> tuple[Any, ...]:
    """Return spans and parameters as the flat list of tensors and numbers in `SCHEMA`. Raises BackendError for masks
    and score functions that cannot be traced.
    """
    rules = parameters.kernel_rules(operator, backend)
    return *spans[:3], parameters.scale, parameters.softcap, parameters.sink_logits, *rules


def unflatten(
    heads: int, starts: Tensor, lengths: Tensor, decode_only: bool, scale: float, softcap: float,
    sink_logits: Tensor | None, *flat: Any,
) -> tuple[Spans, AttentionParameters]:  # fmt: skip
    """Return the spans and parameters that `flatten` flattened, for queries of `heads` heads."""
    rules = AttentionRules(*flat)
    parameters = AttentionParameters(scale, rules.as_mask(heads), softcap, sink_logits, rules.as_score, rules)
    return Spans(starts, lengths, decode_only), parameters


def define_attention(name: str, kv: type, schema: str) -> Operator:
    """Register an attention operator that reads the keys and values of class `kv`. `schema` lists the tensors and
    numbers of `kv.flat`; `kv.unflat` converts them back."""

    def unpack(q: Tensor, *rest: Any) -> tuple[Tensor, KVPages, Spans, AttentionParameters]:
        count = schema.count(",") + 1
        return q, kv.unflat(*rest[:count]), *unflatten(q.shape[1], *rest[count:])

    return define_operator(
        name,
        f"(Tensor q, {schema}, {SCHEMA}) -> Tensor",
        lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
        {
            Backend.EAGER: "compiled_kernels.attention:attention_reference",
            Backend.INDUCTOR: "compiled_kernels.paged_attention.inductor:by_spans",
            Backend.TRITON: f"compiled_kernels.{name}.triton:{name}",
            Backend.MLIR: f"compiled_kernels.{name}.mlir:{name}",
        },
        unpack,
    )


def attend_on(
    operator: Operator, backend: Backend, q: Tensor, kv: KVPages, spans: Spans, parameters: AttentionParameters
) -> Tensor:
    """Run an attention operator on a backend: as plain torch code if a graph can express it, else as the opaque
    operation.
    """
    inside = torch.compiler.is_compiling()
    if spans.parents is not None:
        if backend is not Backend.EAGER or inside:
            raise BackendError(f"{operator.name}: backend {backend}: only eager supports spans that are trees")
        return attention_reference(q, kv, spans, parameters)
    # Find the pages that a user's mask shows outside a graph, because their number depends on the data.
    whole = isinstance(parameters.mask, Causal | SlidingWindow) and kv.chosen is None
    plain = whole or inside and not parameters.rules
    if backend is Backend.INDUCTOR and spans.decode_only and plain:
        return decode_attention(q, kv, spans.context_lengths, parameters)
    if backend not in (Backend.TRITON, Backend.MLIR) and not inside:
        return (by_spans if backend is Backend.INDUCTOR else attention_reference)(q, kv, spans, parameters)
    # The loop over spans reads their lengths, which a graph cannot do: inside a graph, eager and inductor are opaque
    # too.
    return operator.implementation(backend)(q, *kv.flat, *flatten(spans, parameters, operator.name, backend))


PAGED_ATTENTION = define_attention(
    "paged_attention", PagedKV, "Tensor keys, Tensor values, Tensor page_table, Tensor? chosen"
)


def paged_attention(
    q: Float[Tensor, "token head dim"],
    kv: PagedKV,
    spans: Spans,
    parameters: AttentionParameters,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token head dim"]:
    """Compute softmax(scale q kᵀ) v for each query head over the context of its key/value head, in float32.

    Memory beyond a sequence's length never affects a result. A row that sees no key gives zeros, as does a row of no
    sequence: spans begin with row 0 and have no gaps, so such rows come after the last span.

    Args:
        q: queries of all spans, packed.
        kv: the pools of key and value pages, and the page numbers of each sequence.
        spans: the rows of each sequence, and the number of its positions.
        parameters: scale, mask and other changes of the scores.
        backend: the backend.

    Returns:
        Weighted sums of values in the type of `q`.

    Raises:
        BackendError: for masks or scores that the backend does not support: triton and mlir trace them to scalar code
            (see `scalar_code`).
    """
    return attend_on(PAGED_ATTENTION, backend, q, kv, spans, parameters)


def unsupported_reason(backend: Backend, mask: Mask, score: Score | None) -> str | None:
    """Return why a backend does not support this mask and score function; None if it does."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return None
    try:
        rules_of(mask, score, "paged_attention", backend)
    except BackendError as error:
        return str(error)
    return None
