"""The backend mlir of paged attention: decodes together, each longer span for itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.cases import Case
from compiled_kernels.masks import window_and_sinks
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, INDEX_DTYPES, BoundCall, check_argument, libgomp_path
from compiled_kernels.mlir_text import MLIR_TYPES, THREADS, Target, exp_function
from compiled_kernels.paged_attention.mlir_decode import DecodeAttention, attention_text, entry_text
from compiled_kernels.paged_attention.mlir_shape import PagedHeads
from compiled_kernels.paged_attention.mlir_spans import BLOCK_POSITIONS, SpanAttention, span_text

MIN_ITEMS_PER_THREAD = 8  # with fewer rows times groups a thread, the context is split too


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    span_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int,
    sinks: int,
    decode_only: bool,
    softcap: float,
    sink_logits: Tensor | None,
    alibi: bool,
) -> Tensor:
    if alibi:
        raise BackendError("paged_attention: backend mlir knows no score functions, not ALiBi")
    _expect(q, keys, values, page_table, span_starts, context_lengths, sink_logits, decode_only)
    q = q.contiguous()
    ours = _Paged(keys, values, scale, window, sinks, softcap, sink_logits)
    if decode_only:
        return ours.decodes(q, page_table, context_lengths)
    out = torch.empty_like(q)
    starts, lengths = span_starts.tolist(), context_lengths.tolist()
    if starts[-1] < len(out):
        out[starts[-1] :] = 0
    first = next((i for i in range(len(lengths)) if starts[i + 1] - starts[i] != 1), len(lengths))
    if first:
        out[:first] = ours.decodes(q[:first], page_table[:first], context_lengths[:first])
    for seq in range(first, len(lengths)):
        rows = slice(starts[seq], starts[seq + 1])
        if rows.start < rows.stop:
            ours.span(q[rows], page_table[seq], lengths[seq], out[rows])
    return out


def _expect(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    span_starts: Tensor,
    context_lengths: Tensor,
    sink_logits: Tensor | None,
    decode_only: bool,
) -> None:
    """Refuse what the kernels would read or write beyond a tensor's end; page numbers are believed."""
    name = "paged_attention"
    (tokens, heads, dim), (pages, groups, size, _) = q.shape, keys.shape
    seqs, held = page_table.shape
    check_argument(name, "q", q, (tokens, heads, dim), COMPUTE_DTYPES, contiguous=False)
    for pool, numbers in (("keys", keys), ("values", values)):
        check_argument(name, pool, numbers, (pages, groups, size, dim), (q.dtype,))
    check_argument(
        name, "page_table", page_table, (tokens if decode_only else seqs, held), INDEX_DTYPES, contiguous=False
    )
    check_argument(name, "context_lengths", context_lengths, (seqs,), INDEX_DTYPES, contiguous=False)
    if sink_logits is not None:
        check_argument(name, "sink_logits", sink_logits, (heads,), (sink_logits.dtype,), contiguous=False)
    if heads % groups:
        raise BackendError(f"{name}: {heads} query heads are no whole number for each of {groups} groups")
    if seqs and (longest := int(context_lengths.max())) > held * size:
        raise BackendError(f"{name}: a context of {longest} does not fit the table's {held} pages of {size}")
    if not decode_only:
        check_argument(name, "span_starts", span_starts, (seqs + 1,), INDEX_DTYPES, contiguous=False)
        if int(span_starts[-1]) > tokens:
            raise BackendError(f"{name}: spans end at {int(span_starts[-1])}, after {tokens} queries")


@dataclass(frozen=True)
class _Paged:
    """The values that all spans of a call share: the cache, the mask and the scores' rule."""

    keys: Tensor
    values: Tensor
    scale: float
    window: int
    sinks: int
    softcap: float
    sink_logits: Tensor | None

    def decodes(self, q: Tensor, page_table: Tensor, context_lengths: Tensor) -> Tensor:
        """Attend with each query [row, head, dim] at the end of its own context."""
        tokens, heads, dim = q.shape
        rows = _power(tokens)  # few shapes serve every batch: rows beyond the last have no context
        q, table, lengths = (_padded(part, rows) for part in (q, page_table.int(), context_lengths.int()))
        held = _power(table.shape[1])
        table = torch.nn.functional.pad(table, (0, held - table.shape[1]))
        shape = _decode_shape(rows, held, self._heads(q))
        partial = torch.empty(rows, heads, shape.chunks, dim + 2)
        mixed = torch.empty(rows, heads, dim, dtype=q.dtype)
        cache = self.keys, self.values
        BoundCall(_compiled(shape).address, (q, *cache, table, lengths, partial, *self._sink_logits, mixed))()
        return mixed[:tokens]

    def span(self, q: Tensor, table: Tensor, context: int, out: Tensor) -> None:
        """Attend with one span's queries [token, head, dim] over its context of that many positions, into `out`."""
        shape = SpanAttention(**vars(self._heads(q)))
        elements = (
            -(-context // BLOCK_POSITIONS)
            * shape.num_kv_heads
            * BLOCK_POSITIONS
            * shape.head_dim
            // shape.values_per_element
        )
        laid_out = torch.empty(2, elements, dtype=torch.int32)  # of 4 bytes, as float32 is
        sizes = torch.tensor([q.shape[0], context])
        cache = self.keys, self.values
        BoundCall(
            _compiled_spans(shape).address,
            (q, *cache, table.int().contiguous(), sizes, *laid_out, *self._sink_logits, out),
        )()

    @property
    def _sink_logits(self) -> tuple[Tensor, ...]:
        return () if self.sink_logits is None else (self.sink_logits.float().contiguous(),)

    def _heads(self, q: Tensor) -> PagedHeads:
        return PagedHeads(
            num_heads=q.shape[1],
            num_kv_heads=self.keys.shape[1],
            head_dim=q.shape[2],
            page_size=self.keys.shape[2],
            dtype=MLIR_TYPES[q.dtype],
            scale=self.scale,
            target=Target.current(),
            window=self.window,
            sinks=self.sinks,
            softcap=self.softcap,
            sink_logits=self.sink_logits is not None,
        )


def stages(case: Case, operator: str = "paged_attention") -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`."""
    of = case.arguments
    window, sinks = window_and_sinks(of["mask"], "mlir") if "mask" in of else (0, 0)
    heads = PagedHeads(
        num_heads=of["num_kv_heads"] * of["queries_per_kv"],
        num_kv_heads=of["num_kv_heads"],
        head_dim=of["dim"],
        page_size=of["size"],
        dtype=MLIR_TYPES[of["dtype"]],
        scale=of["dim"] ** -0.5,
        target=Target.current(),
        window=window,
        sinks=sinks,
        softcap=of.get("softcap", 0.0),
        sink_logits=of.get("sinks", False),
    )
    if any(span > 1 for span in of["spans"]):
        return _compiled_spans(SpanAttention(**vars(heads))).stages
    held = max(2, *(-(-context // of["size"]) for context in of["contexts"]))
    return _compiled(_decode_shape(_power(len(of["spans"])), _power(held), heads)).stages


def _power(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()


def _padded(part: Tensor, rows: int) -> Tensor:
    if part.shape[0] == rows:
        return part.contiguous()
    whole = part.new_zeros((rows, *part.shape[1:]))
    whole[: part.shape[0]] = part
    return whole


def _decode_shape(rows: int, held: int, heads: PagedHeads) -> DecodeAttention:
    chunks = (
        torch.get_num_threads() if rows * heads.num_kv_heads < MIN_ITEMS_PER_THREAD * torch.get_num_threads() else 1
    )
    return DecodeAttention(rows=rows, max_pages=held, chunks=chunks, **vars(heads))


@functools.lru_cache(maxsize=512)
def _compiled_spans(shape: SpanAttention) -> Kernel:
    return _compile(shape, span_text(shape))


@functools.lru_cache(maxsize=512)
def _compiled(shape: DecodeAttention) -> Kernel:
    return _compile(shape, attention_text(shape, "attend"), entry_text(shape))


def _compile(shape: PagedHeads, *functions: str) -> Kernel:
    text = "\n".join((THREADS, exp_function(shape.lanes), *functions))
    return compile_text(text, "paged_attention", level=shape.target.level, libraries=(libgomp_path(),))
