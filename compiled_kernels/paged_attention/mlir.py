"""Run paged attention on the backend mlir: all decodes in one call, each longer span in its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, KVPages, Spans
from compiled_kernels.backends import BackendError
from compiled_kernels.mlir import Kernel, compile_entry
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, INDEX_DTYPES, BoundCall, check_argument
from compiled_kernels.paged_attention.api import PagedKV
from compiled_kernels.paged_attention.mlir_decode import attend_rows
from compiled_kernels.paged_attention.mlir_pages import Context
from compiled_kernels.paged_attention.mlir_shape import BLOCK_POSITIONS, DecodeAttention, SpanAttention
from compiled_kernels.paged_attention.mlir_spans import attend_spans

NAME = "paged_attention"


def paged_attention(q: Tensor, kv: PagedKV, spans: Spans, parameters: AttentionParameters) -> Tensor:
    _expect(q, kv, spans, parameters)
    return attend(NAME, _context, q, kv, (kv.keys, kv.values), spans, parameters)


def _expect(q: Tensor, kv: PagedKV, spans: Spans, parameters: AttentionParameters) -> None:
    """Raise BackendError for arguments with which the kernels would access memory beyond a tensor's end; page numbers
    are not checked.
    """
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
        raise BackendError(f"{NAME}: {heads} query heads are not a multiple of {groups} key/value heads")
    if seqs and (longest := int(spans.context_lengths.max())) > held * size:
        raise BackendError(f"{NAME}: a context of {longest} does not fit the table's {held} pages of {size}")
    if not spans.decode_only:
        check_argument(NAME, "span_starts", spans.starts, (seqs + 1,), INDEX_DTYPES, contiguous=False)
        if int(spans.starts[-1]) > tokens:
            raise BackendError(f"{NAME}: spans end at {int(spans.starts[-1])}, after {tokens} queries")


def attend(
    operator: str, context: Callable[..., Context], q: Tensor, kv: KVPages, pages: Sequence[Tensor], spans: Spans,
    parameters: AttentionParameters,
) -> Tensor:  # fmt: skip
    """Compute attention of all decodes in one call, and of each longer span in its own. `context(q, kv, parameters,
    is_decode)` returns the description of the keys and values that are read."""
    q, sinks = q.contiguous(), parameters.sink_logits
    logits = [] if sinks is None else [sinks.float().contiguous()]
    out = torch.zeros_like(q)
    decodes, longer = (len(q), []) if spans.decode_only else spans.decodes_and_longer()

    def part(tensor: Tensor, place: slice | int) -> Tensor:
        return tensor if spans.decode_only else tensor[place]  # creating a view takes microseconds

    def run(reads: Context, rows: slice, length: int, tables: list[Tensor], work: Iterable[Tensor]) -> None:
        sizes = torch.tensor([rows.stop - rows.start, length, *(table.shape[-1] for table in tables), 0][:4])
        tables = [table.int().contiguous() for table in tables]
        chosen = [] if kv.chosen is None else [part(kv.chosen, rows).to(torch.int8).contiguous()]
        arguments = part(q, rows), *pages, *tables, sizes, *chosen, *work, *logits, part(out, rows)
        BoundCall(compiled(reads, operator).address, arguments)()

    if decodes:
        rows = slice(0, decodes)
        reads = context(part(q, rows), kv, parameters, True)
        tables = [part(table, rows) for table in (*kv.tables[::-1], spans.context_lengths)]
        partial = torch.empty(decodes, reads.shape.num_heads, reads.shape.chunks, reads.shape.head_dim + 2)
        run(reads, rows, 0, tables, [partial])
    for seq, rows, length in longer:
        reads = context(q[rows], kv, parameters, False)
        tables = [table[seq] for table in kv.tables[::-1]]
        positions = -(-length // BLOCK_POSITIONS) * BLOCK_POSITIONS * reads.shape.num_kv_heads * len(tables)
        elements = positions * reads.shape.head_dim // reads.shape.values_per_element
        # 4 bytes an element, as for float32
        run(reads, rows, length, tables, torch.empty(2, elements, dtype=torch.int32))
    return out


def _context(q: Tensor, kv: PagedKV, parameters: AttentionParameters, decodes: bool) -> Context:
    kind = DecodeAttention if decodes else SpanAttention
    return Context(kind.from_tensors(NAME, q, kv.keys, parameters, selected=kv.chosen is not None))


@functools.lru_cache(maxsize=512)
def compiled(context: Context, operator: str) -> Kernel:
    """Return the kernel that reads this context, for decodes or for a span."""
    emit = attend_spans if isinstance(context.shape, SpanAttention) else attend_rows
    return compile_entry(operator, context.shape.target.level, lambda: emit(context, operator))
