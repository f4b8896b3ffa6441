"""Attention of single queries over paged keys and values as MLIR text, with a running softmax page by page.

Work is cut into items: one sequence, one group, one chunk of its pages. All query heads of a group read each key and
value while it lies in the nearest cache. What an item finds, unscaled sums with their peak and their total, goes to
`partial`; `merge` puts the chunks of a head together.

    entry, or a decode step:  @item for each item | @merge for each row      (at the bar threads wait for one another)
    @item:  @pages, first for the sinks, then for the window    @pages:  @tile for each page
"""

from __future__ import annotations

from compiled_kernels.paged_attention.mlir_item import item, pages
from compiled_kernels.paged_attention.mlir_merge import merge
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention
from compiled_kernels.paged_attention.mlir_tile import tile

__all__ = ["Attention", "attention_text", "entry_text"]


def attention_text(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_item(queries, keys, values, table, lengths, partial, row, group, chunk) and @{name}_merge(partial[,
    sink logits], mixed, begin, end), with what they call; @exp must be there."""
    return "\n".join((tile(shape, name), pages(shape, name), item(shape, name), merge(shape, name)))


def entry_text(shape: DecodeAttention) -> str:
    """Emit @paged_attention(q [row, head, dim], keys, values, table, lengths, partial[, sink logits], mixed [row, head
    * dim]), run by all threads at once over the functions named `attend`."""
    t = shape.types
    sink = f", %sinks: {t['sinks']}" if shape.sink_logits else ""
    sunk, sunk_type = (", %sinks", f", {t['sinks']}") if shape.sink_logits else ("", "")
    return f"""func.func @paged_attention(%q: {t["q"]}, %k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]}, %lengths: {t["lengths"]},
    %partial: {t["partial"]}{sink}, %mixed: {t["mixed"]}) {{
  %thread, %threads = call @thread() : () -> (index, index)
  %queries = memref.alloca() {{alignment = 64 : i64}} : {t["queries"]}
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %dim = arith.constant {shape.head_dim} : index
  %share = arith.constant {shape.queries_per_kv} : index
  %groups = arith.constant {shape.num_kv_heads} : index
  %chunks = arith.constant {shape.chunks} : index
  %items = arith.constant {shape.rows * shape.num_kv_heads * shape.chunks} : index
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
        %value = memref.load %q[%row, %head, %d] : {t["q"]}
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
