"""Decode attention: one item of work, which is one sequence, one group and one chunk of its pages."""

from __future__ import annotations

from compiled_kernels.paged_attention.mlir_shape import DecodeAttention


def pages(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_pages(q [share, dim], k, v, table, partial, row, group, chunk, scores, weights, begin, end, first,
    last): the tile of every page of the row's table from begin to end, cut to the positions from first to last."""
    t = shape.types
    return f"""func.func private @{name}_pages(%q: {t["queries"]}, %k: {t["pages"]}, %v: {t["pages"]},
    %table: {t["table"]}, %partial: {t["partial"]}, %row: index, %group: index, %chunk: index, %scores: {t["scores"]},
    %weights: {t["weights"]}, %begin: index, %end: index, %first: index, %last: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%size = arith.constant {shape.page_size} : index
scf.for %p = %begin to %end step %one {{
  %base = arith.muli %p, %size : index
  %started = arith.cmpi ugt, %first, %base : index
  %skipped = arith.subi %first, %base : index
  %from = arith.select %started, %skipped, %zero : index
  %left = arith.subi %last, %base : index
  %to = arith.minui %left, %size : index
  %number = memref.load %table[%row, %p] : {t["table"]}
  %page = arith.index_cast %number : i32 to index
  %after = arith.addi %p, %one : index
  %more = arith.cmpi ult, %after, %end : index
  %later = arith.select %more, %after, %p : index
  %next_number = memref.load %table[%row, %later] : {t["table"]}
  %next = arith.index_cast %next_number : i32 to index
  func.call @{name}_tile(%q, %k, %v, %page, %next, %group, %from, %to, %partial, %row, %chunk, %scores, %weights)
    : ({t["queries"]}, {t["pages"]}, {t["pages"]}, index, index, index, index, index, {t["partial"]}, index, index, {t["scores"]},
       {t["weights"]}) -> ()
}}
return
}}"""


def item(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_item(q [share, dim], k, v, table, lengths, partial, row, group, chunk): the chunk's part of the
    row's context, for all query heads of the group, into `partial`."""
    t = shape.types
    walks = [_walk(shape, name, "%begin, %end, %first, %length")]
    if shape.sinks:
        walks = [_sinks(shape), _walk(shape, name, "%zero, %sink_pages, %zero, %sink_end"), *walks]
    return f"""func.func private @{name}_item(%q: {t["queries"]}, %k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]},
    %lengths: {t["lengths"]}, %partial: {t["partial"]}, %row: index, %group: index, %chunk: index) {{
%scores = memref.alloca() {{alignment = 64 : i64}} : {t["scores"]}
%weights = memref.alloca() {{alignment = 64 : i64}} : {t["weights"]}
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%share = arith.constant {shape.queries_per_kv} : index
%size = arith.constant {shape.page_size} : index
%dim = arith.constant {shape.head_dim} : index
%total_at = arith.constant {shape.head_dim + 1} : index
{empty(shape)}
%length32 = memref.load %lengths[%row] : {t["lengths"]}
%length = arith.index_cast %length32 : i32 to index
{_first(shape)}
{_chunk(shape)}
{chr(10).join(walks)}
return
}}"""


def empty(shape: DecodeAttention) -> str:
    """Emit the state before any key: sums 0, peak minus infinity, total 0."""
    partial = shape.types["partial"]
    return f"""%none = arith.constant 0xFF800000 : f32
%nothing = arith.constant 0.0 : f32
%base = arith.muli %group, %share : index
%last_head = arith.addi %base, %share : index
scf.for %h = %base to %last_head step %one {{
  scf.for %d = %zero to %dim step %one {{
    memref.store %nothing, %partial[%row, %h, %chunk, %d] : {partial}
  }}
  memref.store %none, %partial[%row, %h, %chunk, %dim] : {partial}
  memref.store %nothing, %partial[%row, %h, %chunk, %total_at] : {partial}
}}"""


def _first(shape: DecodeAttention) -> str:
    """Emit %first: the first position in the window."""
    if not shape.window:
        return "%first = arith.addi %zero, %zero : index"
    return f"""%window = arith.constant {shape.window} : index
%long = arith.cmpi ugt, %length, %window : index
%past = arith.subi %length, %window : index
%first = arith.select %long, %past, %zero : index"""


def _chunk(shape: DecodeAttention) -> str:
    """Emit %begin and %end: the chunk's pages of the table. Counted from the end: the last chunk is never empty."""
    return f"""%start = arith.divui %first, %size : index
%stop = arith.ceildivui %length, %size : index
%pages = arith.subi %stop, %start : index
%chunks = arith.constant {shape.chunks} : index
%each = arith.ceildivui %pages, %chunks : index
%after = arith.subi %chunks, %chunk : index
%after_me = arith.subi %after, %one : index
%back = arith.muli %each, %after : index
%back_end = arith.muli %each, %after_me : index
%reach = arith.minui %back, %pages : index
%reach_end = arith.minui %back_end, %pages : index
%begin = arith.subi %stop, %reach : index
%end = arith.subi %stop, %reach_end : index"""


def _sinks(shape: DecodeAttention) -> str:
    """Emit %sink_pages and %sink_end: pages and positions of the sinks before the window; the first chunk sees to
    them."""
    return f"""%sinks = arith.constant {shape.sinks} : index
%kept = arith.minui %sinks, %first : index
%mine = arith.cmpi eq, %chunk, %zero : index
%sink_end = arith.select %mine, %kept, %zero : index
%sink_pages = arith.ceildivui %sink_end, %size : index"""


def _walk(shape: DecodeAttention, name: str, bounds: str) -> str:
    """Emit a call of @{name}_pages with these (begin, end, first, last)."""
    t = shape.types
    given = f"%q, %k, %v, %table, %partial, %row, %group, %chunk, %scores, %weights, {bounds}"
    memories = f"{t['queries']}, {t['pages']}, {t['pages']}, {t['table']}, {t['partial']}"
    kinds = f"{memories}, index, index, index, {t['scores']}, {t['weights']}, index, index, index, index"
    return f"func.call @{name}_pages({given})\n  : ({kinds}) -> ()"
