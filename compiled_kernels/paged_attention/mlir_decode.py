"""Attention of single queries over paged keys and values as MLIR text, with a running softmax page by page.

Work is cut into items: one sequence, one KV head, one chunk of its pages. All query heads of a KV head read each key
and value while it lies in the nearest cache. An item writes its unscaled sums, their peak and their total to `partial`;
`merge` combines the chunks of a head (FlashDecoding, Dao et al. 2023).

    entry, or a decode step:  @item for each item | @merge for each row      (at the bar threads wait for one another)
    @item:  @pages, first for the sinks, then for the window    @pages:  @tile for each page
"""

from __future__ import annotations

from compiled_kernels.mlir_text import Lines
from compiled_kernels.paged_attention.mlir_rules import seek_text
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention
from compiled_kernels.paged_attention.mlir_tile import tile


def pages(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_pages(q [share, dim], k, v, table, partial, row, group, chunk, scores, weights, begin, end, first,
    last, position[, chosen]): the tile of every page of the row's table from begin to end that is chosen, and in which
    the query at `position` may see a key, cut to the positions from first to last."""
    t = shape.types
    given = "%q, %k, %v, %page, %next, %group, %from, %to, %base, %position, %partial, %row, %chunk, %scores, %weights"
    kinds = f"""{t["queries"]}, {t["pages"]}, {t["pages"]}, index, index, index, index, index, index, index,
    {t["partial"]}, index, index, {t["scores"]}, {t["weights"]}"""
    body = f"""{offsets_of_page()}
  %number = memref.load %table[%row, %p] : {t["table"]}
  %page = arith.index_cast %number : i32 to index
  %next_number = memref.load %table[%row, %later] : {t["table"]}
  %next = arith.index_cast %next_number : i32 to index
  func.call @{name}_tile({given})
    : ({kinds}) -> ()"""
    return f"""func.func private @{name}_pages(%q: {t["queries"]}, %k: {t["pages"]}, %v: {t["pages"]},
    %table: {t["table"]}, %partial: {t["partial"]}, %row: index, %group: index, %chunk: index, %scores: {t["scores"]},
    %weights: {t["weights"]}, %begin: index, %end: index, %first: index, %last: index, %position: index{_chosen(shape)}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%size = arith.constant {shape.page_size} : index
{for_each_page(shape, name, body)}
return
}}"""


def offsets_of_page() -> str:
    """Emit %from and %to: the offsets of page %p, which begins at position %base, from %first to %last."""
    return """  %base = arith.muli %p, %size : index
  %started = arith.cmpi ugt, %first, %base : index
  %skipped = arith.subi %first, %base : index
  %from = arith.select %started, %skipped, %zero : index
  %left = arith.subi %last, %base : index
  %to = arith.minui %left, %size : index"""


def for_each_page(shape: DecodeAttention, name: str, body: str) -> str:
    """Emit `body` for each page %p from %begin to %end in which the query at %position may see a key; %later is the
    page after it, or %p where there is none."""
    if not shape.skips_pages:
        return f"""scf.for %p = %begin to %end step %one {{
  %after = arith.addi %p, %one : index
  %more = arith.cmpi ult, %after, %end : index
  %later = arith.select %more, %after, %p : index
{body}
}}"""
    given, kind = (", %chosen", f", {shape.types['chosen']}") if shape.selected else ("", "")
    return f"""%start = func.call @{name}_seek(%begin, %end, %position, %group{given}) : (index, index, index, index{kind}) -> index
scf.while (%at = %start) : (index) -> index {{
  %inside = arith.cmpi ult, %at, %end : index
  scf.condition(%inside) %at : index
}} do {{
^bb0(%p: index):
  %after = arith.addi %p, %one : index
  %following = func.call @{name}_seek(%after, %end, %position, %group{given}) : (index, index, index, index{kind}) -> index
  %more = arith.cmpi ult, %following, %end : index
  %later = arith.select %more, %following, %p : index
{body}
  scf.yield %following : index
}}"""


def item(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_item(q [share, dim], k, v, table, lengths, partial, row, group, chunk[, chosen]): the chunk's part of
    the row's context, for all query heads of the group, into `partial`."""
    t = shape.types
    walks = [_walk(shape, name, "%begin, %end, %first, %length")]
    if shape.num_sink_tokens:
        walks = [_sinks(shape), _walk(shape, name, "%zero, %sink_pages, %zero, %sink_end"), *walks]
    return f"""func.func private @{name}_item(%q: {t["queries"]}, %k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]},
    %lengths: {t["lengths"]}, %partial: {t["partial"]}, %row: index, %group: index, %chunk: index{_chosen(shape)}) {{
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
%position = arith.subi %length, %one : index
{first_seen(shape, "first")}
{_chunk(shape)}
{chr(10).join(walks)}
return
}}"""


def _chosen(shape: DecodeAttention) -> str:
    """Return the declaration of the last argument: which pages are read."""
    return f", %chosen: {shape.types['chosen']}" if shape.selected else ""


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


def first_seen(shape: DecodeAttention, name: str) -> str:
    """Emit %{name}: the first position in the window."""
    if not shape.sliding_window:
        return f"%{name} = arith.addi %zero, %zero : index"
    return f"""%window = arith.constant {shape.sliding_window} : index
%long = arith.cmpi ugt, %length, %window : index
%past = arith.subi %length, %window : index
%{name} = arith.select %long, %past, %zero : index"""


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
    return f"""%sinks = arith.constant {shape.num_sink_tokens} : index
%kept = arith.minui %sinks, %first : index
%mine = arith.cmpi eq, %chunk, %zero : index
%sink_end = arith.select %mine, %kept, %zero : index
%sink_pages = arith.ceildivui %sink_end, %size : index"""


def _walk(shape: DecodeAttention, name: str, bounds: str) -> str:
    """Emit a call of @{name}_pages with these (begin, end, first, last), for the query at %position."""
    t = shape.types
    given = f"%q, %k, %v, %table, %partial, %row, %group, %chunk, %scores, %weights, {bounds}, %position"
    memories = f"{t['queries']}, {t['pages']}, {t['pages']}, {t['table']}, {t['partial']}"
    kinds = f"{memories}, index, index, index, {t['scores']}, {t['weights']}, index, index, index, index, index"
    if shape.selected:
        given, kinds = f"{given}, %chosen", f"{kinds}, {t['chosen']}"
    return f"func.call @{name}_pages({given})\n  : ({kinds}) -> ()"


def merge(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_merge(partial[, sink logits], mixed [row, head * dim], begin, end): for the rows from begin to end,
    every head's chunks, weighed by their peaks, over their common total where weights are normalized; a row without a
    context is zero."""
    t, lines = shape.types, Lines()
    peak_at, total_at = lines.index(shape.head_dim), lines.index(shape.head_dim + 1)
    chunks = [lines.index(chunk) for chunk in range(shape.chunks)]
    if shape.normalized:
        factors = _factors(lines, shape, chunks, peak_at)
        total = _total(lines, shape, chunks, factors, total_at)
        shares = [lines.let(f"arith.divf {factor}, {total} : f32") for factor in factors[: shape.chunks]]
    else:
        shares = [lines.exp(peak, 0) for peak in _peaks(lines, shape, chunks, peak_at)]
    _mixed(lines, shape, chunks, [lines.splat(share, shape.columns) for share in shares])
    sinks = f", %sinks: {t['sinks']}" if shape.sink_logits else ""
    return f"""func.func private @{name}_merge(%partial: {t["partial"]}{sinks}, %mixed: {t["mixed"]},
    %begin: index, %end: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%heads = arith.constant {shape.num_heads} : index
scf.for %row = %begin to %end step %one {{
scf.for %head = %zero to %heads step %one {{
{lines.text()}
}}
}}
return
}}"""


def _peaks(lines: Lines, shape: DecodeAttention, chunks: list[str], peak_at: str) -> list[str]:
    return [lines.let(f"memref.load %partial[%row, %head, {c}, {peak_at}] : {shape.types['partial']}") for c in chunks]


def _factors(lines: Lines, shape: DecodeAttention, chunks: list[str], peak_at: str) -> list[str]:
    """Emit exp(peak - highest peak) of each chunk, and last of the sink logit, if there is one."""
    t = shape.types
    highest = lines.let("arith.constant -3.0e38 : f32")  # below every score: a peak of nothing is no number
    peaks = _peaks(lines, shape, chunks, peak_at)
    if shape.sink_logits:
        peaks.append(lines.let(f"memref.load %sinks[%head] : {t['sinks']}"))
    for peak in peaks:
        highest = lines.let(f"arith.maximumf {highest}, {peak} : f32")
    return [lines.exp(lines.let(f"arith.subf {peak}, {highest} : f32"), 0) for peak in peaks]


def _total(lines: Lines, shape: DecodeAttention, chunks: list[str], factors: list[str], total_at: str) -> str:
    """Emit the divisor of the head's sums: the chunks' totals times their factors; 1 where that is 0."""
    total = lines.let("arith.constant 0.0 : f32")
    for chunk, factor in zip(chunks, factors, strict=False):
        found = lines.let(f"memref.load %partial[%row, %head, {chunk}, {total_at}] : {shape.types['partial']}")
        total = lines.let(f"arith.addf {total}, {lines.let(f'arith.mulf {found}, {factor} : f32')} : f32")
    if shape.sink_logits:
        total = lines.let(f"arith.addf {total}, {factors[-1]} : f32")
    nothing, one = lines.let("arith.constant 0.0 : f32"), lines.let("arith.constant 1.0 : f32")
    empty = lines.let(f"arith.cmpf oeq, {total}, {nothing} : f32")
    return lines.let(f"arith.select {empty}, {one}, {total} : f32")


def _mixed(lines: Lines, shape: DecodeAttention, chunks: list[str], shares: list[str]) -> None:
    """Emit mixed[row, head] = the chunks' sums, each times its share, rounded."""
    t, lanes = shape.types, shape.columns
    base = lines.let(f"arith.muli %head, {lines.index(shape.head_dim)} : index")
    for at in range(0, shape.head_dim, lanes):
        column = lines.index(at)
        mixed = lines.constant("0.0", lanes)
        for chunk, share in zip(chunks, shares, strict=True):
            sums = lines.load("%partial", f"%row, %head, {chunk}, {column}", t["partial"], lanes, "f32")
            mixed = lines.fma(sums, share, mixed, lanes)
        place = lines.let(f"arith.addi {base}, {column} : index")
        rounded = lines.truncate(mixed, lanes, shape.dtype)
        lines.store(rounded, "%mixed", f"%row, {place}", t["mixed"], lanes, shape.dtype)


def attention_text(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_item(queries, keys, values, table, lengths, partial, row, group, chunk[, chosen]) and
    @{name}_merge(partial[, sink logits], mixed, begin, end), with what they call."""
    seek = [seek_text(shape, name)] if shape.skips_pages else []
    return "\n".join((*seek, tile(shape, name), pages(shape, name), item(shape, name), merge(shape, name)))


def entry_text(shape: DecodeAttention) -> str:
    """Emit @paged_attention(q [row, head, dim], keys, values, table, lengths[, selections], partial[, sink logits],
    mixed [row, head * dim]), run by all threads at once over the functions named `attend`."""
    t = shape.types
    selections = f" %selections: {t['selections']}," if shape.selected else ""
    given, kind = (", %chosen", f", {t['chosen']}") if shape.selected else ("", "")
    sink = f", %sinks: {t['sinks']}" if shape.sink_logits else ""
    sunk, sunk_type = (", %sinks", f", {t['sinks']}") if shape.sink_logits else ("", "")
    return f"""func.func @paged_attention(%q: {t["q"]}, %k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]}, %lengths: {t["lengths"]},{selections}
    %partial: {t["partial"]}{sink}, %mixed: {t["mixed"]}) {{
  %thread, %threads = call @thread() : () -> (index, index)
  %queries = memref.alloca() {{alignment = 64 : i64}} : {t["queries"]}
  %chosen = memref.alloca() : {t["chosen"]}
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
{_selection(shape)}
    func.call @attend_item(%queries, %k, %v, %table, %lengths, %partial, %row, %group, %chunk{given})
      : ({t["queries"]}, {t["pages"]}, {t["pages"]}, {t["table"]}, {t["lengths"]}, {t["partial"]}, index, index, index{kind}) -> ()
  }}
  call @GOMP_barrier() : () -> ()
  %begin, %end = call @share(%rows, %one, %thread, %threads) : (index, index, index, index) -> (index, index)
  call @attend_merge(%partial{sunk}, %mixed, %begin, %end) : ({t["partial"]}{sunk_type}, {t["mixed"]}, index, index) -> ()
  return
}}"""


def _selection(shape: DecodeAttention) -> str:
    """Emit the pages that the row reads for the group, to %chosen."""
    if not shape.selected:
        return ""
    t = shape.types
    return f"""    %held = arith.constant {shape.max_pages} : index
    scf.for %p = %zero to %held step %one {{
      %read = memref.load %selections[%row, %group, %p] : {t["selections"]}
      memref.store %read, %chosen[%p] : {t["chosen"]}
    }}"""
