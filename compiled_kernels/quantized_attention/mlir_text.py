"""Attention over packed and residual pages as MLIR text: the walk of paged_attention/mlir_decode.py over two kinds of
pages.

    entry:  @item for each item | @merge for each row      (at the bar threads wait for one another)
    @item:  @recent for the first positions, @packed for the quantized, @recent for the others
    @packed, @recent:  @quantized_tile, @tile for each page

A row is one token at the end of its own context, whether it decodes or is one of a longer span: every token reads by
the same arithmetic, however its text was cut into steps.
"""

from __future__ import annotations

from compiled_kernels.mlir_text import Lines
from compiled_kernels.paged_attention.mlir_merge import merge
from compiled_kernels.paged_attention.mlir_tile import tile
from compiled_kernels.quantized_attention.mlir_item import span_function, item, pages_text
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention
from compiled_kernels.quantized_attention.mlir_tile import QUANTIZED_NAMES, quantized_arguments, quantized_tile


def attention_text(shape: QuantizedAttention, name: str) -> str:
    """Emit @{name}_item, @{name}_merge and @{name}_widen, with what they call but for @span; @exp must be there."""
    tiles = tile(shape, name), quantized_tile(shape, name), *(pages_text(shape, name, recent) for recent in (True, False))
    return "\n".join((*tiles, item(shape, name), merge(shape, name), widen(shape, name)))


def widen(shape: QuantizedAttention, name: str) -> str:
    """Emit @{name}_widen(queries [share, dim], the same as float32)."""
    lines, lanes = Lines(), shape.columns
    for at in range(0, shape.head_dim, lanes):
        column = lines.index(at)
        given = lines.load("%queries", f"%h, {column}", shape.types["queries"], lanes, shape.dtype)
        lines.store(lines.extend(given, lanes, shape.dtype), "%floats", f"%h, {column}", shape.float_queries_type, lanes)
    return f"""func.func private @{name}_widen(%queries: {shape.types["queries"]}, %floats: {shape.float_queries_type}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%share = arith.constant {shape.queries_per_kv} : index
scf.for %h = %zero to %share step %one {{
{lines.text()}
}}
return
}}"""


def entry_text(shape: QuantizedAttention) -> str:
    """Emit @quantized_attention(q [row, head, dim], quantized keys and values, residual keys and values, quantized
    table, recent table, owner of each row, length of each row, (rows, held packed, held recent), partial[, sink
    logits], mixed), run by all threads at once over the functions named `attend`; `owners` say which lines of the
    tables a row reads."""
    t, flat = shape.types, shape.flat_type
    sink = f", %sinks: {t['sinks']}" if shape.sink_logits else ""
    sunk, sunk_type = (", %sinks", f", {t['sinks']}") if shape.sink_logits else ("", "")
    packed = ", ".join(f"%{name}" for name in QUANTIZED_NAMES)
    kinds = f"{t['queries']}, {shape.float_queries_type}, {', '.join(shape.quantized_types)}, {t['pages']}, {t['pages']}"
    return f"""{span_function()}
func.func @quantized_attention(%q: {t["q"]}, {quantized_arguments(shape)}, %k: {t["pages"]}, %v: {t["pages"]},
    %quantized_table: {flat}, %residual_table: {flat}, %owners: {flat}, %lengths: {flat}, %sizes: memref<3xi32>,
    %partial: {t["partial"]}{sink}, %mixed: {t["mixed"]}) {{
  %thread, %threads = call @thread() : () -> (index, index)
  %queries = memref.alloca() {{alignment = 64 : i64}} : {t["queries"]}
  %floats = memref.alloca() {{alignment = 64 : i64}} : {shape.float_queries_type}
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %two = arith.constant 2 : index
  %share = arith.constant {shape.queries_per_kv} : index
  %groups = arith.constant {shape.num_kv_heads} : index
  %chunks = arith.constant {shape.chunks} : index
  %each = arith.constant {shape.num_kv_heads * shape.chunks} : index
  %rows32 = memref.load %sizes[%zero] : memref<3xi32>
  %packed_held32 = memref.load %sizes[%one] : memref<3xi32>
  %recent_held32 = memref.load %sizes[%two] : memref<3xi32>
  %rows = arith.index_cast %rows32 : i32 to index
  %packed_held = arith.index_cast %packed_held32 : i32 to index
  %recent_held = arith.index_cast %recent_held32 : i32 to index
  %items = arith.muli %rows, %each : index
  scf.for %item = %thread to %items step %threads {{
    %chunk = arith.remui %item, %chunks : index
    %pair = arith.divui %item, %chunks : index
    %group = arith.remui %pair, %groups : index
    %row = arith.divui %pair, %groups : index
    %first = arith.muli %group, %share : index
    %owner32 = memref.load %owners[%row] : {flat}
    %owner = arith.index_cast %owner32 : i32 to index
    %length32 = memref.load %lengths[%row] : {flat}
    %length = arith.index_cast %length32 : i32 to index
    %packed_place = arith.muli %owner, %packed_held : index
    %recent_place = arith.muli %owner, %recent_held : index
    scf.for %h = %zero to %share step %one {{
      %head = arith.addi %first, %h : index
{_queries(shape)}
    }}
    func.call @attend_widen(%queries, %floats) : ({t["queries"]}, {shape.float_queries_type}) -> ()
    func.call @attend_item(%queries, %floats, {packed}, %k, %v, %quantized_table, %residual_table, %packed_place,
      %recent_place, %length, %partial, %row, %group, %chunk)
      : ({kinds}, {flat}, {flat}, index, index, index, {t["partial"]}, index, index, index) -> ()
  }}
  call @GOMP_barrier() : () -> ()
  %begin, %end = call @share(%rows, %one, %thread, %threads) : (index, index, index, index) -> (index, index)
  call @attend_merge(%partial{sunk}, %mixed, %begin, %end) : ({t["partial"]}{sunk_type}, {t["mixed"]}, index, index) -> ()
  return
}}"""


def _queries(shape: QuantizedAttention) -> str:
    """Emit one head of %q to %queries."""
    lines, lanes = Lines("q"), shape.columns
    for at in range(0, shape.head_dim, lanes):
        column = lines.index(at)
        given = lines.load("%q", f"%row, %head, {column}", shape.types["q"], lanes, shape.dtype)
        lines.store(given, "%queries", f"%h, {column}", shape.types["queries"], lanes, shape.dtype)
    return lines.text()
