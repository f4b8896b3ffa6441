"""The lane mlir of paged attention: every token of a span is a query over its own context."""

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
    tokens, heads, dim = q.shape
    table, lengths = page_table.int(), context_lengths.int()
    if not decode_only:
        spans = span_starts.diff()
        owner = torch.repeat_interleave(torch.arange(len(spans)), spans)
        behind = span_starts[1:][owner] - torch.arange(tokens) - 1
        table, lengths = table[owner], (context_lengths[owner] - behind).int()
    rows = 1 << (tokens - 1).bit_length()  # few shapes serve every batch: rows beyond the last have no context
    q, table, lengths = (_padded(part, rows) for part in (q, table, lengths))
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
    rows = 1 << (sum(of["spans"]) - 1).bit_length()
    held = 1 << (max(2, *(-(-context // of["size"]) for context in of["contexts"])) - 1).bit_length()
    window, sinks = band(of["mask"], "mlir") if "mask" in of else (0, 0)
    heads = of["groups"] * of["share"]
    more = of.get("softcap", 0.0), of.get("sinks", False)
    scale = of["dim"] ** -0.5
    shape = _shape(rows, heads, of["groups"], of["dim"], of["size"], held, of["dtype"], scale, window, sinks, *more)
    return _compiled(shape).stages


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
