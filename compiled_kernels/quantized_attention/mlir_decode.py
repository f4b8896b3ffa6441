"""Attention over quantized and residual pages as MLIR text: the walk of paged_attention/mlir_decode.py over two kinds
of pages.

    entry:  @item for each item | @merge for each row      (at the bar threads wait for one another)
    @item:  @recent for the first positions, @packed for the quantized, @recent for the others
    @packed:  @quantized_tile for each page    @recent:  @tile for each page

A row is one token at the end of its own context, whether it decodes or is one of a longer span: every token reads by
the same arithmetic, however its text was cut into steps. An item is one row, one KV head and one chunk of its pages.

    positions   0 .... sinks | sinks ............ quantized_until | quantized_until ... length
    pages        residual    |    quantized, split into chunks    |         residual
    seen by      chunk 0     |    every chunk its own part        |      the last chunk

A window cuts all three from the left; of what lies before it the sinks, which are among the first `num_sink_tokens`,
are still seen.
"""

from __future__ import annotations

from compiled_kernels.mlir_text import Lines
from compiled_kernels.paged_attention.mlir_decode import empty, first_seen, for_each_page, merge, offsets_of_page
from compiled_kernels.paged_attention.mlir_rules import seek_text
from compiled_kernels.paged_attention.mlir_tile import tile
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention
from compiled_kernels.quantized_attention.mlir_tile import quantized_arguments, quantized_tile
from compiled_kernels.quantized_attention.quantize import QUANTIZED_NAMES

_PACKED = ", ".join(f"%{name}" for name in QUANTIZED_NAMES)


def pages_text(shape: QuantizedAttention, name: str, recent: bool) -> str:
    """Emit @{name}_recent(q, k, v, ...) and @{name}_packed(q, packed, ...; table, place, partial, row, group, chunk,
    scores, weights, first, last, begin, end, position): the tiles of pages from begin to end in which the query at
    `position` may see a key, cut to positions from first to last. The row's page numbers stand in `table` from `place`
    on."""
    t = shape.types
    pages = f"%k: {t['pages']}, %v: {t['pages']}" if recent else quantized_arguments(shape)
    given = "%k, %v" if recent else _PACKED
    kinds = f"{t['pages']}, {t['pages']}" if recent else ", ".join(shape.quantized_types)
    queries, tile = (t["queries"], "tile") if recent else (shape.float_queries_type, "quantized_tile")
    places = "%page, %next, %group, %from, %to, %base, %position, %partial, %row, %chunk, %scores, %weights"
    rest = f"{', '.join(['index'] * 7)}, {t['partial']}, index, index, {t['scores']}, {t['weights']}"
    body = f"""{offsets_of_page()}
  %at_table = arith.addi %place, %p : index
  %number = memref.load %table[%at_table] : {shape.flat_type}
  %page = arith.index_cast %number : i32 to index
  %next_at = arith.addi %place, %later : index
  %next_number = memref.load %table[%next_at] : {shape.flat_type}
  %next = arith.index_cast %next_number : i32 to index
  func.call @{name}_{tile}(%q, {given}, {places})
    : ({queries}, {kinds}, {rest}) -> ()"""
    return f"""func.func private @{name}_{"recent" if recent else "packed"}(%q: {queries}, {pages},
    %table: {shape.flat_type}, %place: index, %partial: {t["partial"]}, %row: index, %group: index, %chunk: index,
    %scores: {t["scores"]}, %weights: {t["weights"]}, %first: index, %last: index, %begin: index, %end: index,
    %position: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%size = arith.constant {shape.page_size} : index
{for_each_page(shape, name, body)}
return
}}"""


def span_function() -> str:
    """Emit @span(first, last, size): the pages from begin to end that positions from first to last lie in."""
    return """func.func private @span(%first: index, %last: index, %size: index) -> (index, index) {
%some = arith.cmpi ugt, %last, %first : index
%begin = arith.divui %first, %size : index
%stop = arith.ceildivui %last, %size : index
%end = arith.select %some, %stop, %begin : index
return %begin, %end : index, index
}"""


def item(shape: QuantizedAttention, name: str) -> str:
    """Emit @{name}_item(queries [share, dim], the same as float32, packed, k, v, quantized table, residual table,
    their places, length, partial, row, group, chunk): the chunk's part of the row's context, for all query heads of
    the group."""
    t = shape.types
    return f"""func.func private @{name}_item(%q: {t["queries"]}, %f: {shape.float_queries_type}, {quantized_arguments(shape)},
    %k: {t["pages"]}, %v: {t["pages"]}, %quantized_table: {shape.flat_type}, %residual_table: {shape.flat_type}, %packed_place: index,
    %recent_place: index, %length: index, %partial: {t["partial"]}, %row: index, %group: index, %chunk: index) {{
%scores = memref.alloca() {{alignment = 64 : i64}} : {t["scores"]}
%weights = memref.alloca() {{alignment = 64 : i64}} : {t["weights"]}
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%share = arith.constant {shape.queries_per_kv} : index
%size = arith.constant {shape.page_size} : index
%dim = arith.constant {shape.head_dim} : index
%total_at = arith.constant {shape.head_dim + 1} : index
%position = arith.subi %length, %one : index
{empty(shape)}
{_settled(shape)}
{first_seen(shape, "seen")}
%front_mine = arith.cmpi eq, %chunk, %zero : index
scf.if %front_mine {{
{_front(shape, name)}
}}
%packed_from = arith.maxui %front, %seen : index
{_chunk(shape)}
{_packed_walk(shape, name)}
%last_chunk = arith.constant {shape.chunks - 1} : index
%end_mine = arith.cmpi eq, %chunk, %last_chunk : index
scf.if %end_mine {{
  %end_from = arith.maxui %settled, %seen : index
{_recent_walk(shape, name, "end", "%end_from", "%length")}
}}
return
}}"""


def _settled(shape: QuantizedAttention) -> str:
    """Emit %settled and %front: where quantized positions end and begin. If nothing is quantized both are 0."""
    return f"""%lag = arith.constant {shape.layout.rule.residual_length} : index
%run = arith.constant {shape.layout.rule.quant_group} : index
%kept_full = arith.constant {shape.layout.rule.num_sink_tokens} : index
%old = arith.cmpi ugt, %length, %lag : index
%past_lag = arith.subi %length, %lag : index
%aged = arith.select %old, %past_lag, %zero : index
%runs = arith.divui %aged, %run : index
%whole = arith.muli %runs, %run : index
%any = arith.cmpi ugt, %whole, %kept_full : index
%settled = arith.select %any, %whole, %zero : index
%front = arith.select %any, %kept_full, %zero : index"""


def _front(shape: QuantizedAttention, name: str) -> str:
    """Emit the visible part of the first positions: those of the window and those of its sinks, which are in full
    precision whether or not anything is quantized."""
    walks = [_recent_walk(shape, name, "front", "%seen", "%front")]
    if shape.sliding_window and shape.num_sink_tokens:
        sinks = f"""%sinks = arith.constant {shape.num_sink_tokens} : index
%sink_end = arith.minui %sinks, %seen : index"""
        walks = [sinks, _recent_walk(shape, name, "sink", "%zero", "%sink_end"), *walks]
    return "\n".join(walks)


def _chunk(shape: QuantizedAttention) -> str:
    """Emit %begin and %end: the chunk's share of the quantized pages."""
    return f"""%start, %stop = func.call @span(%packed_from, %settled, %size) : (index, index, index) -> (index, index)
%pages = arith.subi %stop, %start : index
%chunks = arith.constant {shape.chunks} : index
%each = arith.ceildivui %pages, %chunks : index
%before_me = arith.muli %each, %chunk : index
%mine = arith.addi %start, %before_me : index
%after_me = arith.addi %mine, %each : index
%begin = arith.minui %mine, %stop : index
%end = arith.minui %after_me, %stop : index"""


def _packed_walk(shape: QuantizedAttention, name: str) -> str:
    t = shape.types
    given = "%quantized_table, %packed_place, %partial, %row, %group, %chunk, %scores, %weights, %packed_from, %settled"
    kinds = (
        f"{shape.flat_type}, index, {t['partial']}, index, index, index, {t['scores']}, {t['weights']}, index, index"
    )
    return f"""func.call @{name}_packed(%f, {_PACKED}, {given}, %begin, %end, %position)
  : ({shape.float_queries_type}, {", ".join(shape.quantized_types)}, {kinds}, index, index, index) -> ()"""


def _recent_walk(shape: QuantizedAttention, name: str, mark: str, first: str, last: str) -> str:
    """Emit a call of @{name}_recent for positions from first to last, none where last does not lie after first."""
    t = shape.types
    given = f"%residual_table, %recent_place, %partial, %row, %group, %chunk, %scores, %weights, {first}, {last}"
    kinds = (
        f"{shape.flat_type}, index, {t['partial']}, index, index, index, {t['scores']}, {t['weights']}, index, index"
    )
    return f"""%{mark}_begin, %{mark}_stop = func.call @span({first}, {last}, %size) : (index, index, index) -> (index, index)
func.call @{name}_recent(%q, %k, %v, {given}, %{mark}_begin, %{mark}_stop, %position)
  : ({t["queries"]}, {t["pages"]}, {t["pages"]}, {kinds}, index, index, index) -> ()"""


def attention_text(shape: QuantizedAttention, name: str) -> str:
    """Emit @{name}_item, @{name}_merge and @{name}_widen, with what they call but for @span."""
    tiles = (
        *([seek_text(shape, name)] if shape.mask else []),
        tile(shape, name),
        quantized_tile(shape, name),
        *(pages_text(shape, name, recent) for recent in (True, False)),
    )
    return "\n".join((*tiles, item(shape, name), merge(shape, name), widen(shape, name)))


def widen(shape: QuantizedAttention, name: str) -> str:
    """Emit @{name}_widen(queries [share, dim], the same as float32)."""
    lines, lanes = Lines(), shape.columns
    for at in range(0, shape.head_dim, lanes):
        column = lines.index(at)
        given = lines.load("%queries", f"%h, {column}", shape.types["queries"], lanes, shape.dtype)
        lines.store(
            lines.extend(given, lanes, shape.dtype), "%floats", f"%h, {column}", shape.float_queries_type, lanes
        )
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
    kinds = (
        f"{t['queries']}, {shape.float_queries_type}, {', '.join(shape.quantized_types)}, {t['pages']}, {t['pages']}"
    )
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
