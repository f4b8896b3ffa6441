"""The backend mlir of paged attention: decodes together, each longer span for itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.backends import BackendError
from compiled_kernels.cases import Case, suite_of
from compiled_kernels.mlir import Kernel, compile_entry
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, INDEX_DTYPES, BoundCall, check_argument
from compiled_kernels.paged_attention.api import PagedKV
from compiled_kernels.paged_attention.mlir_decode import Context, attend_rows
from compiled_kernels.paged_attention.mlir_shape import (
    BLOCK_POSITIONS,
    DecodeAttention,
    SpanAttention,
    num_chunks,
)
from compiled_kernels.paged_attention.mlir_spans import attend_spans

NAME = "paged_attention"


def paged_attention(q: Tensor, kv: PagedKV, spans: Spans, parameters: AttentionParameters) -> Tensor:
    _expect(q, kv, spans, parameters)
    q = q.contiguous()
    if spans.decode_only:
        return _decodes(q, kv, spans.context_lengths, parameters)
    decodes, longer = spans.decodes_and_longer()
    out = torch.zeros_like(q)
    if decodes:
        out[:decodes] = _decodes(q[:decodes], kv.first(decodes), spans.context_lengths[:decodes], parameters)
    for seq, rows, context in longer:
        chosen = None if kv.chosen is None else kv.chosen[rows]
        _span(q[rows], kv._replace(chosen=chosen), kv.page_table[seq], context, parameters, out[rows])
    return out


def _expect(q: Tensor, kv: PagedKV, spans: Spans, parameters: AttentionParameters) -> None:
    """Refuse what the kernels would read or write beyond a tensor's end; page numbers are believed."""
    (tokens, heads, dim), (pages, groups, size, _), (seqs, held) = q.shape, kv.keys.shape, kv.page_table.shape
    check_argument(NAME, "q", q, (tokens, heads, dim), COMPUTE_DTYPES, contiguous=False)
    for pool, numbers in (("keys", kv.keys), ("values", kv.values)):
        check_argument(NAME, pool, numbers, (pages, groups, size, dim), (q.dtype,))
    rows = tokens if spans.decode_only else seqs
    if kv.chosen is not None:
        check_argument(NAME, "chosen", kv.chosen, (tokens, groups, held), (torch.bool,), contiguous=False)
    check_argument(NAME, "page_table", kv.page_table, (rows, held), INDEX_DTYPES, contiguous=False)
    check_argument(NAME, "context_lengths", spans.context_lengths, (seqs,), INDEX_DTYPES, contiguous=False)
    if (sink_logits := parameters.sink_logits) is not None:
        check_argument(NAME, "sink_logits", sink_logits, (heads,), (sink_logits.dtype,), contiguous=False)
    if heads % groups:
        raise BackendError(f"{NAME}: {heads} query heads are no whole number for each of {groups} groups")
    if seqs and (longest := int(spans.context_lengths.max())) > held * size:
        raise BackendError(f"{NAME}: a context of {longest} does not fit the table's {held} pages of {size}")
    if not spans.decode_only:
        check_argument(NAME, "span_starts", spans.starts, (seqs + 1,), INDEX_DTYPES, contiguous=False)
        if int(spans.starts[-1]) > tokens:
            raise BackendError(f"{NAME}: spans end at {int(spans.starts[-1])}, after {tokens} queries")


def _decodes(q: Tensor, kv: PagedKV, context_lengths: Tensor, parameters: AttentionParameters) -> Tensor:
    """Attend with each query [row, head, dim] at the end of its own context."""
    shape, owners = _decode_shape(q, kv, parameters), torch.arange(len(q), dtype=torch.int32)
    pages, rows = [kv.keys, kv.values], (owners, context_lengths.int())
    return attend_rows_of(_compiled(shape), shape, q, pages, kv.tables, rows, parameters, kv.chosen)


def attend_rows_of(
    kernel: Kernel, shape: DecodeAttention, q: Tensor, pages: Sequence[Tensor], tables: Sequence[Tensor],
    rows: tuple[Tensor, Tensor], parameters: AttentionParameters, chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return what `mlir_decode.attend_rows` gives for q [row, head, dim]; `rows` are owner and length of each."""
    tokens, heads, dim = q.shape
    tables = [table.int().contiguous() for table in tables]
    sizes = torch.tensor([tokens, *(table.shape[1] for table in tables), 0][:3], dtype=torch.int32)
    partial, mixed = torch.empty(tokens, heads, shape.chunks, dim + 2), torch.empty_like(q.contiguous())
    marks = [] if chosen is None else [chosen.to(torch.int8).contiguous()]
    arguments = q.contiguous(), *pages, *tables, *(each.contiguous() for each in rows), sizes, *marks, partial
    BoundCall(kernel.address, [*arguments, *_sink_logits(parameters), mixed])()
    return mixed


def _span(q: Tensor, kv: PagedKV, table: Tensor, context: int, parameters: AttentionParameters, out: Tensor) -> None:
    """Attend with one span's queries [token, head, dim] over its context of that many positions, into `out`."""
    shape = SpanAttention.from_tensors(NAME, q, kv.keys, parameters, selected=kv.chosen is not None)
    blocks = -(-context // BLOCK_POSITIONS) * shape.num_kv_heads
    elements = blocks * BLOCK_POSITIONS * shape.head_dim // shape.values_per_element
    laid_out = torch.empty(2, elements, dtype=torch.int32)  # of 4 bytes, as float32 is
    sizes = torch.tensor([q.shape[0], context, len(table)])
    chosen = [] if kv.chosen is None else [kv.chosen.to(torch.int8).contiguous()]
    read = q, kv.keys, kv.values, table.int().contiguous(), sizes, *chosen
    BoundCall(_compiled_spans(shape).address, (*read, *laid_out, *_sink_logits(parameters), out))()


def _sink_logits(parameters: AttentionParameters) -> tuple[Tensor, ...]:
    return () if parameters.sink_logits is None else (parameters.sink_logits.float().contiguous(),)


def stages(case: Case, operator: str = NAME) -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`."""
    q, kv, spans, parameters = suite_of(operator).make_inputs(case)
    if spans.decode_only:
        return _compiled(_decode_shape(q, kv, parameters)).stages
    selected = kv.chosen is not None
    return _compiled_spans(SpanAttention.from_tensors(NAME, q, kv.keys, parameters, selected=selected)).stages


def _decode_shape(q: Tensor, kv: PagedKV, parameters: AttentionParameters) -> DecodeAttention:
    chunks, selected = num_chunks(len(q), kv.keys.shape[1]), kv.chosen is not None
    return DecodeAttention.from_tensors(NAME, q, kv.keys, parameters, chunks=chunks, selected=selected)


@functools.lru_cache(maxsize=512)
def _compiled_spans(shape: SpanAttention) -> Kernel:
    return compile_entry(NAME, shape.target.level, lambda: attend_spans(shape))


@functools.lru_cache(maxsize=512)
def _compiled(shape: DecodeAttention) -> Kernel:
    return compile_entry(NAME, shape.target.level, lambda: attend_rows(Context(shape), NAME))
