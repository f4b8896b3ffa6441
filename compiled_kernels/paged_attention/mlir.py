"""The lane mlir of paged attention: decodes together, each longer span for itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.cases import Case
from compiled_kernels.lanes import LaneError
from compiled_kernels.masks import band
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir_text import THREADS, TYPES, Target, exp_function, memref
from compiled_kernels.openmp import Call, library
from compiled_kernels.paged_attention.mlir_spans import BLOCK, SpanAttention
from compiled_kernels.paged_attention.mlir_text import Attention

FEW = 8  # with fewer rows times groups a thread, the context is split too


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
) -> Tensor:
    if q.dtype != keys.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        raise LaneError(f"paged_attention: lane mlir wants queries and cache in one of float32 and bfloat16, "
                        f"not {q.dtype} and {keys.dtype}")  # fmt: skip
    q = q.contiguous()
    if decode_only:
        return _decoded(q, keys, values, page_table, context_lengths, scale, window, sinks, softcap, sink_logits)
    out = torch.empty_like(q)
    starts, lengths = span_starts.tolist(), context_lengths.tolist()
    first = next((i for i in range(len(lengths)) if starts[i + 1] - starts[i] != 1), len(lengths))
    if first:
        table, known = page_table[:first], context_lengths[:first]
        out[:first] = _decoded(q[:first], keys, values, table, known, scale, window, sinks, softcap, sink_logits)
    kind = _span_shape(q.shape[1], keys.shape[1], q.shape[2], keys.shape[2], q.dtype, scale, window, sinks, softcap,
                       sink_logits is not None)  # fmt: skip
    for seq in range(first, len(lengths)):
        rows = slice(starts[seq], starts[seq + 1])
        if rows.start < rows.stop:
            _span(kind, q[rows], keys, values, page_table[seq], lengths[seq], sink_logits, out[rows])
    return out


def _span(
    kind: SpanAttention,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    context: int,
    sink_logits: Tensor | None,
    out: Tensor,
) -> None:
    """One span's queries over its context, into `out`."""
    blocks = -(-context // BLOCK) * kind.groups
    laid_out = torch.empty(2, blocks * BLOCK * kind.dim // kind.each, dtype=torch.int32)  # of 4 bytes, as float32 is
    extra = (sink_logits.float(),) if sink_logits is not None else ()
    sizes = torch.tensor([q.shape[0], context])
    Call(_compiled_spans(kind).address, (q, keys, values, table.int(), sizes, *laid_out, *extra, out))()


def _decoded(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int,
    sinks: int,
    softcap: float,
    sink_logits: Tensor | None,
) -> Tensor:
    tokens, heads, dim = q.shape
    rows = 1 << (tokens - 1).bit_length()  # few shapes serve every batch: rows beyond the last have no context
    q, table, lengths = (_padded(part, rows) for part in (q, page_table.int(), context_lengths.int()))
    held = 1 << (table.shape[1] - 1).bit_length()
    table = torch.nn.functional.pad(table, (0, held - table.shape[1]))
    groups, size = keys.shape[1], keys.shape[2]
    sunk = sink_logits is not None
    shape = _shape(rows, heads, groups, dim, size, held, q.dtype, scale, window, sinks, softcap, sunk)
    partial = torch.empty(rows, heads, shape.chunks, dim + 2)
    mixed = torch.empty(rows, heads, dim, dtype=q.dtype)
    extra = (sink_logits.float(),) if sink_logits is not None else ()
    Call(_compiled(shape).address, (q, keys, values, table, lengths, partial, *extra, mixed))()
    return mixed[:tokens]


def stages(case: Case, operator: str = "paged_attention") -> Mapping[str, str]:
    """Every stage of the function that runs for `case`."""
    of = case.arguments
    window, sinks = band(of["mask"], "mlir") if "mask" in of else (0, 0)
    heads, scale = of["groups"] * of["share"], of["dim"] ** -0.5
    more = of["dtype"], scale, window, sinks, of.get("softcap", 0.0), of.get("sinks", False)
    if any(span > 1 for span in of["spans"]):
        return _compiled_spans(_span_shape(heads, of["groups"], of["dim"], of["size"], *more)).stages
    rows = 1 << (len(of["spans"]) - 1).bit_length()
    held = 1 << (max(2, *(-(-context // of["size"]) for context in of["contexts"]), 2) - 1).bit_length()
    return _compiled(_shape(rows, heads, of["groups"], of["dim"], of["size"], held, *more)).stages


def _padded(part: Tensor, rows: int) -> Tensor:
    if part.shape[0] == rows:
        return part.contiguous()
    whole = part.new_zeros((rows, *part.shape[1:]))
    whole[: part.shape[0]] = part
    return whole


def _shape(rows, heads, groups, dim, size, held, dtype, scale, window, sinks, softcap, sunk) -> Attention:
    chunks = torch.get_num_threads() if rows * groups < FEW * torch.get_num_threads() else 1
    return Attention(
        rows, heads, groups, dim, size, held, TYPES[dtype], scale, Target.here(), chunks, window, sinks, softcap, sunk
    )


def _span_shape(heads, groups, dim, size, dtype, scale, window, sinks, softcap, sunk) -> SpanAttention:
    return SpanAttention(heads, groups, dim, size, TYPES[dtype], scale, Target.here(), window, sinks, softcap, sunk)


@functools.lru_cache(maxsize=512)
def _compiled_spans(kind: SpanAttention) -> Kernel:
    text = f"{THREADS}\n{exp_function(kind.lanes)}\n{kind.text()}"
    return compile_text(text, "paged_attention", libraries=(library(),))


@functools.lru_cache(maxsize=512)
def _compiled(shape: Attention) -> Kernel:
    t = shape.types
    q = memref((shape.rows, shape.heads, shape.dim), shape.kind)
    sink = f", %sinks: {t['sinks']}" if shape.sink_logits else ""
    sunk, sunk_type = (", %sinks", f", {t['sinks']}") if shape.sink_logits else ("", "")
    items = shape.rows * shape.groups * shape.chunks
    text = f"""{THREADS}
{exp_function(shape.run)}
{shape.text("attend")}
func.func @paged_attention(%q: {q}, %k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]}, %lengths: {t["lengths"]},
    %partial: {t["partial"]}{sink}, %mixed: {t["mixed"]}) {{
  %thread, %threads = call @thread() : () -> (index, index)
  %queries = memref.alloca() {{alignment = 64 : i64}} : {t["queries"]}
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %dim = arith.constant {shape.dim} : index
  %share = arith.constant {shape.share} : index
  %groups = arith.constant {shape.groups} : index
  %chunks = arith.constant {shape.chunks} : index
  %items = arith.constant {items} : index
  %rows = arith.constant {shape.rows} : index
  scf.for %item = %thread to %items step %threads {{
    %chunk = arith.remui %item, %chunks : index
    %pair = arith.divui %item, %chunks : index
    %group = arith.remui %pair, %groups : index
    %row = arith.divui %pair, %groups : index
    %first = arith.muli %group, %share : index
    scf.for %h = %zero to %share step %one {{
      %head = arith.addi %first, %h : index
      scf.for %d = %zero to %dim step %one {{
        %value = memref.load %q[%row, %head, %d] : {q}
        memref.store %value, %queries[%h, %d] : {t["queries"]}
      }}
    }}
    func.call @attend_item(%queries, %k, %v, %table, %lengths, %partial, %row, %group, %chunk)
      : ({t["queries"]}, {t["pages"]}, {t["pages"]}, {t["table"]}, {t["lengths"]}, {t["partial"]}, index, index, index) -> ()
  }}
  call @GOMP_barrier() : () -> ()
  %begin, %end = call @share(%rows, %one, %thread, %threads) : (index, index, index, index) -> (index, index)
  call @attend_merge(%partial{sunk}, %mixed, %begin, %end) : ({t["partial"]}{sunk_type}, {t["mixed"]}, index, index) -> ()
  return
}}"""
    return compile_text(text, "paged_attention", libraries=(library(),))
