"""The choice of pages inside a decode step as MLIR text: summaries of a page that became whole, and the pages that a
row's queries of one key/value head read."""

from __future__ import annotations

from compiled_kernels.mlir_text import SIZE_BOUND, Lines, Named, declare_arguments, memref, number, vector
from compiled_kernels.page_selection.selection import PageSelection
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention
from compiled_kernels.scalar_code.mlir import ScalarCode

MOVES = {"min": "arith.minimumf", "max": "arith.maximumf", "mean": "arith.addf"}


def summary_arguments(shape: DecodeAttention, selection: PageSelection) -> list[Named]:
    """Return the summaries as arguments, each [page, group, dim]."""
    kind = memref((SIZE_BOUND, shape.num_kv_heads, shape.head_dim), shape.dtype)
    return [Named(f"summary{at}", kind) for at in range(len(selection.summaries))]


def summarize_text(shape: DecodeAttention, selection: PageSelection, name: str) -> str:
    """Emit @{name}_summarize(keys, summaries, table, lengths, row, group): where the row's last position is the last of
    its page, the summaries of that page."""
    t, lanes, lines = shape.types, shape.columns, Lines()
    summaries = summary_arguments(shape, selection)
    for at in range(0, shape.head_dim, lanes):
        column = lines.index(at)
        first = lines.let("arith.constant 0 : index")
        begin = lines.extend(_keys(lines, shape, first, column), lanes, shape.dtype)
        names = [f"%s{at}_{i}" for i in range(len(summaries))]
        found = lines.begin_loop(f"%r{at}", "%o = %one to %size step %one", names, [begin] * len(names), lanes)
        key = lines.extend(_keys(lines, shape, "%o", column), lanes, shape.dtype)
        moved = [
            lines.let(f"{MOVES[kind]} {so_far}, {key} : {vector(lanes)}")
            for kind, so_far in zip(selection.summaries, names, strict=True)
        ]
        lines.end_loop(moved, lanes)
        for summary, kind, value in zip(summaries, selection.summaries, found, strict=True):
            if kind == "mean":
                count = lines.constant(number(shape.page_size), lanes)
                value = lines.let(f"arith.divf {value}, {count} : {vector(lanes)}")
            rounded = lines.truncate(value, lanes, shape.dtype)
            lines.store(rounded, f"%{summary.name}", f"%page, %group, {column}", summary.type, lanes, shape.dtype)
    arguments = [
        Named("keys", t["pages"]), *summaries, Named("table", t["table"]), Named("lengths", t["lengths"]),
        Named("row", "index"), Named("group", "index"),
    ]  # fmt: skip
    return f"""func.func private @{name}_summarize({declare_arguments(arguments)}) {{
%one = arith.constant 1 : index
%zero = arith.constant 0 : index
%size = arith.constant {shape.page_size} : index
%length32 = memref.load %lengths[%row] : {t["lengths"]}
%length = arith.index_cast %length32 : i32 to index
%over = arith.remui %length, %size : index
%whole = arith.cmpi eq, %over, %zero : index
scf.if %whole {{
%position = arith.subi %length, %one : index
%place = arith.divui %position, %size : index
%number = memref.load %table[%row, %place] : {t["table"]}
%page = arith.index_cast %number : i32 to index
{lines.text()}
}}
return
}}"""


def _keys(lines: Lines, shape: DecodeAttention, offset: str, column: str) -> str:
    return lines.load("%keys", f"%page, %group, {offset}, {column}", shape.pages, shape.columns, shape.dtype)


def select_text(shape: DecodeAttention, selection: PageSelection, name: str) -> str:
    """Emit @{name}_select(q [share, dim], summaries, table, lengths, row, group, chosen): which pages of its table the
    row reads for the group, up to its own."""
    t, scores = shape.types, memref((shape.max_pages,), "f32")
    arguments = [
        Named("q", t["queries"]), *summary_arguments(shape, selection), Named("table", t["table"]),
        Named("lengths", t["lengths"]), Named("row", "index"), Named("group", "index"), Named("chosen", t["chosen"]),
    ]  # fmt: skip
    lines = Lines()
    code = ScalarCode(lines, f"{name}_select", shape.columns)
    best = _score(lines, code, shape, selection)
    tables = "\n".join(code.declarations.values())
    return f"""{tables}
func.func private @{name}_select({declare_arguments(arguments)}) {{
%scores = memref.alloca() : {scores}
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%size = arith.constant {shape.page_size} : index
%share = arith.constant {shape.queries_per_kv} : index
%first = arith.constant {selection.first} : index
%keep = arith.constant {selection.keep} : index
%most = arith.constant {selection.first + selection.keep} : index
%least = arith.constant 0xFF800000 : f32
%read = arith.constant 1 : i8
%hidden = arith.constant 0 : i8
%length32 = memref.load %lengths[%row] : {t["lengths"]}
%length = arith.index_cast %length32 : i32 to index
%position = arith.subi %length, %one : index
%own = arith.divui %position, %size : index
memref.store %read, %chosen[%own] : {t["chosen"]}
%few = arith.cmpi ule, %own, %most : index
scf.if %few {{
  scf.for %p = %zero to %own step %one {{
    memref.store %read, %chosen[%p] : {t["chosen"]}
  }}
}} else {{
  scf.for %p = %zero to %first step %one {{
    memref.store %read, %chosen[%p] : {t["chosen"]}
  }}
  scf.for %p = %first to %own step %one {{
    %number = memref.load %table[%row, %p] : {t["table"]}
    %page = arith.index_cast %number : i32 to index
    %score = scf.for %h = %zero to %share step %one iter_args(%best = %least) -> (f32) {{
{lines.text()}
      scf.yield {best} : f32
    }}
    memref.store %score, %scores[%p] : {scores}
    memref.store %hidden, %chosen[%p] : {t["chosen"]}
  }}
  scf.for %k = %zero to %keep step %one {{
    %top, %at = scf.for %p = %first to %own step %one iter_args(%highest = %least, %place = %own) -> (f32, index) {{
      %score = memref.load %scores[%p] : {scores}
      %higher = arith.cmpf ogt, %score, %highest : f32
      %new_highest = arith.select %higher, %score, %highest : f32
      %new_place = arith.select %higher, %p, %place : index
      scf.yield %new_highest, %new_place : f32, index
    }}
    memref.store %least, %scores[%at] : {scores}
    memref.store %read, %chosen[%at] : {t["chosen"]}
  }}
}}
return
}}"""


def _score(lines: Lines, code: ScalarCode, shape: DecodeAttention, selection: PageSelection) -> str:
    """Emit the higher of %best and the score of page %page for query head %h."""
    program, lanes = selection.term, shape.columns
    total = lines.constant("0.0", lanes)
    for at in range(0, shape.head_dim, lanes):
        column = lines.index(at)
        query = lines.load("%q", f"%h, {column}", shape.types["queries"], lanes, shape.dtype)
        inputs = {program.inputs[0][0]: lines.extend(query, lanes, shape.dtype)}
        for (name, _), summary in zip(program.inputs[1:], summary_arguments(shape, selection), strict=True):
            kept = lines.load(f"%{summary.name}", f"%page, %group, {column}", summary.type, lanes, shape.dtype)
            inputs[name] = lines.extend(kept, lanes, shape.dtype)
        term = code.emit(program, inputs)
        total = lines.let(f"arith.addf {total}, {term} : {vector(lanes)}")
    return lines.let(f"arith.maximumf %best, {lines.hsum(total, lanes)} : f32")
