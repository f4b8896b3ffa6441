"""Products of many rows with a weight in panels as MLIR text: sums of tiles in registers, blocks of weights in cache.

    for each run of rows (`MAX_RUN_ROWS` at most, a thread's own)
      for each pair of panels
        for each block along the width
          [unpack the block into numbers, once for all rows]
          for each tile of 6 rows:  @{name}_tile  sums of tile x pair in registers; they join those in `sums`
                                    @{name}_fetch  ask for a part of the next block, which memory brings meanwhile
        finish: what becomes of the pair's sums (see `Finish`)

A block of the weight (two panels of `k_block`) stays in the nearest caches while all rows of the run go past it. Where
the processor has no bfloat16 arithmetic, or the weight is INT8, the block is first unpacked into a scratch block of
the thread's own, as the tile multiplies it: float32, or pairs of bfloat16. (Goto and van de Geijn, 2008, without
packing what is in order already.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiled_kernels.blocked.few import finished, scales_at
from compiled_kernels.blocked.layout import PANEL, PANEL_PAIR
from compiled_kernels.blocked.registers import InputRows, scaled_parts, step_sums, unpack
from compiled_kernels.blocked.shape import TILE_ROWS, VALUES_PER_WORD, Panels, rows_type
from compiled_kernels.linear_w8a8.mlir_rows import panel_sums, row_scale
from compiled_kernels.linear_w8a8.mlir_rows import unpack as unpack_int8
from compiled_kernels.mlir_text import SIZE_BOUND, Lines, Named, declare_arguments, memref, vector

MAX_RUN_ROWS = 384  # a multiple of TILE_ROWS: sums of that many rows times a pair of panels are 96 KiB
# %each: how many rows a run has, where [%begin, %end) is walked in runs of whole %tile rows, all about as long and of
# %longest at most.
EVEN_RUNS = """%mine = arith.subi %end, %begin : index
  %runs = arith.ceildivui %mine, %longest : index
  %even = arith.ceildivui %mine, %runs : index
  %tiles_each = arith.ceildivui %even, %tile : index
  %each = arith.muli %tiles_each, %tile : index"""
UNROLL = 4  # steps along the width between two branches, float32; pairs of bfloat16 take two columns a step


@dataclass(frozen=True)
class ManyRows(Panels):
    """A product of any number of rows, at least `TILE_ROWS`. `out` is of `out_dtype` (f32, bf16), has `columns`
    columns unless that is 0, when it has those of the weight. `panel_distance`: the second panel of a pair is that
    many panels after the first, 0 where it is the next. `listed`: the rows of x and out are those that a list names,
    and of the weight some pairs of panels are multiplied (see `listed_arguments`)."""

    out_dtype: str = "f32"
    columns: int = 0
    panel_distance: int = 0
    listed: bool = False

    @property
    def multiplied_dtype(self) -> str:
        """Type of x as it is multiplied: bfloat16 where sums are of pairs of such, float32 otherwise; with `w8a8`, as
        it is quantized, which is in its own type for every number of rows."""
        if self.w8a8:
            return self.x_dtype
        return "bf16" if self.uses_bf16_pairs else "f32"

    @property
    def multiplied(self) -> int:
        """Values of the weight in a word as the tile multiplies it."""
        return self.int8_rows.values if self.w8a8 else VALUES_PER_WORD[self.multiplied_dtype]

    @property
    def x_type(self) -> str:
        return self.int8_rows.type(SIZE_BOUND) if self.w8a8 else rows_type(self.in_features, self.multiplied_dtype)

    @property
    def out_type(self) -> str:
        return rows_type(self.columns or self.out_features, self.out_dtype)

    @property
    def sums_type(self) -> str:
        return memref((MAX_RUN_ROWS, PANEL_PAIR), self.sum_kind)

    @property
    def in_place(self) -> bool:
        """Tell whether the weight is multiplied where it is stored. Tiles that hold but a part of a pair walk the block
        several times, and a line of cache has a row of words of each part: there a scratch block is quicker."""
        stored = self.multiplied == self.values_per_word if self.w8a8 else self.weight_dtype == self.multiplied_dtype
        return stored and self.vectors_per_tile * self.lanes == PANEL_PAIR

    @property
    def block_type(self) -> str:
        """Return the memref type of what a tile reads its weights from: the weight, or a scratch block."""
        if self.in_place:
            return self.weight_types[0]
        return memref((2, self.k_block // self.multiplied, PANEL), "i32")


# Arguments of a `listed` product: row i of x and of out is %order[i]; pairs of panels from first_pair to pair_end are
# multiplied, and the weight's column %skipped_columns stands first in out.
ORDER_TYPE = memref((SIZE_BOUND,), "i64")


def listed_arguments(order: str = ORDER_TYPE) -> list[Named]:
    """Return the arguments of a `listed` product, whose list is of memref type `order`."""
    return [Named("order", order), *(Named(name, "index") for name in ("first_pair", "pair_end", "skipped_columns"))]


Finish = Callable[[Lines, ManyRows, str, str], None]
"""Adds to a text what becomes of a row's sums of one pair of panels. Given are the lines, the product, and as MLIR
names the row of x and out and the row of `%sums`; `%pair` counts pairs of panels, weights are `%w0`, `%w1`, ..."""


def many_text(product: ManyRows, finish: Finish) -> str:
    """Emit @name(x [row, width], words, scales, bias, out [row, columns], begin, end, rows): the rows from begin to
    end of `rows` in all; x may be read, but not written, beyond them."""
    weights = tuple(Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types))
    listed = listed_arguments() if product.listed else []
    given = declare_arguments([Named("x", product.x_type), *weights, Named("out", product.out_type), *listed])
    head = f"func.func private @{product.name}({given}, %begin: index, %end: index, %rows: index)"
    whole = (f"{head} attributes {{no_inline}} {{", _body(product, finish), "return\n}")
    return "\n".join((_tile(product), _fetch(product), *whole))


def _body(product: ManyRows, finish: Finish) -> str:
    """Emit the runs of rows, as equal as they can be: a last run of few rows would read the whole weight for them."""
    scratch = "" if product.in_place else f"%block = memref.alloca() {{alignment = 64 : i64}} : {product.block_type}"
    pairs = (product.panel_distance if product.panel_distance else product.out_features // PANEL) // (
        1 if product.panel_distance else 2
    )
    walked = "%first_pair to %pair_end" if product.listed else "%zero to %pairs"
    return f"""%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%two = arith.constant 2 : index
%panel = arith.constant {PANEL} : index
%tile = arith.constant {TILE_ROWS} : index
%longest = arith.constant {MAX_RUN_ROWS} : index
%width = arith.constant {product.in_features} : index
%k_block = arith.constant {product.k_block} : index
%sums = memref.alloca() {{alignment = 64 : i64}} : {product.sums_type}
{scratch}
%some = arith.cmpi ugt, %end, %begin : index
scf.if %some {{
  {EVEN_RUNS}
  %pairs = arith.constant {pairs} : index
  %last_row = arith.subi %rows, %tile : index
  scf.for %run = %begin to %end step %each {{
    %run_after = arith.addi %run, %each : index
    %run_end = arith.minui %run_after, %end : index
    %count = arith.subi %run_end, %run : index
    scf.for %pair = {walked} step %one {{
{_pair(product)}
{_finished(product, finish)}
    }}
  }}
}}"""


def _pair(product: ManyRows) -> str:
    """Emit sums of the run's rows with one pair of panels."""
    if product.panel_distance:
        panels = f"%first = arith.addi %pair, %zero : index\n%apart = arith.constant {product.panel_distance} : index"
    else:
        panels = "%first = arith.muli %pair, %two : index\n%apart = arith.addi %zero, %one : index"
    if product.in_place:
        unpacked = ""
        block = "%w0, %sums, %row, %slot, %first, %second, %at, %k, %k_end, %zero, %later"
    else:
        unpacked = _unpacked(product)
        block = "%block, %sums, %row, %slot, %zero, %one, %at, %zero, %length, %k, %later"
    step = product.vectors_per_tile * product.lanes
    return f"""{panels}
%second = arith.addi %first, %apart : index
scf.for %k = %zero to %width step %k_block {{
  %k_after = arith.addi %k, %k_block : index
  %k_end = arith.minui %k_after, %width : index
  %length = arith.subi %k_end, %k : index
  %later = arith.cmpi ugt, %k, %zero : index
  {unpacked}
  {_next_block(product)}
  %columns = arith.constant {PANEL_PAIR} : index
  %step = arith.constant {step} : index
  scf.for %at = %zero to %columns step %step {{
    %walked = arith.cmpi ugt, %at, %zero : index
    %fetched = arith.select %walked, %zero, %block_rows : index
    scf.for %slot = %zero to %count step %tile {{
      %next_row = arith.addi %run, %slot : index
      %row = arith.minui %next_row, %last_row : index
      func.call @{product.name}_tile(%x, {block}{", %order" if product.listed else ""}) : ({product.x_type},
        {product.block_type}, {product.sums_type}, index, index, index, index, index, index, index, index, i1
        {", " + ORDER_TYPE if product.listed else ""}) -> ()
      %turn = arith.divui %slot, %tile : index
      %fetch_from = arith.muli %turn, %fetched_each : index
      %fetch_after = arith.addi %fetch_from, %fetched_each : index
      %fetch_end = arith.minui %fetch_after, %fetched : index
      func.call @{product.name}_fetch(%w0, %next_first, %next_second, %next_at, %fetch_from, %fetch_end)
        : ({product.weight_types[0]}, index, index, index, index, index) -> ()
    }}
  }}
}}"""


# No other expert's weights are asked for: after the last pair it is asked for again.
LAST_PANELS = """%last_pair = arith.subi %pair_end, %one : index
  %last_first = arith.muli %last_pair, %between : index
  %beyond = arith.minui %after, %last_first : index"""


def _next_block(product: ManyRows) -> str:
    """Find where the block after this one lies (after the last one any place will do), and how many of its rows are
    fetched beside each tile: in the first of the walks over the tiles, none in the others."""
    between = 1 if product.panel_distance else 2
    return f"""%more_here = arith.cmpi ult, %k_after, %width : index
  %next_k = arith.select %more_here, %k_after, %zero : index
  %values_a_word = arith.constant {product.values_per_word} : index
  %next_at = arith.divui %next_k, %values_a_word : index
  %between = arith.constant {between} : index
  %{"after" if product.listed else "beyond"} = arith.addi %first, %between : index
  {LAST_PANELS if product.listed else ""}
  %next_first = arith.select %more_here, %first, %beyond : index
  %next_second = arith.addi %next_first, %apart : index
  %block_rows = arith.constant {product.k_block // product.values_per_word} : index
  %tiles = arith.ceildivui %count, %tile : index
  %fetched_each = arith.ceildivui %block_rows, %tiles : index"""


def _fetch(product: ManyRows) -> str:
    """Emit @{name}_fetch(words, first, second, at, from, to): asks for rows `from` to `to` of the block that begins
    with row `at` of the panels `first` and `second`, for the second cache."""
    lines = Lines()
    for panel in ("%first", "%second"):
        for column in range(0, PANEL, 16):
            place = f"{panel}, %row, {lines.index(column)}"
            lines.emit(f"memref.prefetch %w0[{place}], read, locality<2>, data : {product.weight_types[0]}")
    numbers = ", ".join(f"%{name}: index" for name in ("first", "second", "at", "from", "to"))
    return f"""func.func private @{product.name}_fetch(%w0: {product.weight_types[0]}, {numbers}) {{
%one = arith.constant 1 : index
scf.for %i = %from to %to step %one {{
  %row = arith.addi %at, %i : index
{lines.text()}
}}
return
}}"""


def _unpacked(product: ManyRows) -> str:
    """Both panels from %k to %k_end, as the tile multiplies them, in %block."""
    lines, lanes = Lines("u"), product.lanes
    values, entering = product.values_per_word, product.multiplied
    row, parts = lines.let(f"arith.divui %in, {lines.index(values)} : index"), values // entering
    at = lines.let("arith.subi %in, %k : index")
    first = lines.let(f"arith.divui {at}, {lines.index(entering)} : index")
    places = [lines.let(f"arith.addi {first}, {lines.index(part)} : index") for part in range(parts)]
    for side, panel in enumerate(("%first", "%second")):
        for column in range(0, PANEL, lanes):
            where = lines.index(column)
            words = lines.load("%w0", f"{panel}, {row}, {where}", product.weight_types[0], lanes, "i32")
            scales = scales_at(lines, product, panel, "%in", [column])
            for place, word in zip(places, _unpacked_words(lines, product, words, scales), strict=True):
                lines.store(word, "%block", f"{lines.index(side)}, {place}, {where}", product.block_type, lanes, "i32")
    return f"""%values = arith.constant {values} : index
scf.for %in = %k to %k_end step %values {{
{lines.text()}
}}"""


def _unpacked_words(lines: Lines, product: ManyRows, words: str, scales: list[str]) -> list[str]:
    """A vector of the weight's words as vectors of words that the tile multiplies."""
    lanes, kind = product.lanes, vector(product.lanes, "i32")
    if product.w8a8:  # bytes are unpacked in the tile, where they are multiplied as they are
        return unpack_int8(lines, product.int8_rows, words) if product.multiplied < product.values_per_word else [words]
    given = vector(2 * lanes, "bf16") if product.uses_bf16_pairs else vector(lanes)
    cast = "vector.bitcast" if product.uses_bf16_pairs else "arith.bitcast"
    parts = unpack(lines, words, product.weight_dtype, lanes, product.uses_bf16_pairs)
    parts = scaled_parts(lines, parts, scales[0], lanes) if scales else parts
    return [lines.let(f"{cast} {part} : {given} to {kind}") for part in parts]


def _finished(product: ManyRows, finish: Finish) -> str:
    """Finish the sums of every row of the run. A tile that would end beyond the last row of all begins so
    much earlier, and its rows stand that much later in the sums."""
    lines = Lines("f")
    done = lines.index_of("%order[%done]", ORDER_TYPE) if product.listed else "%done"
    finish(lines, product, done, "%kept")
    return f"""scf.for %done = %run to %run_end step %one {{
  %in_run = arith.subi %done, %run : index
  %in_tile = arith.remui %in_run, %tile : index
  %tile_slot = arith.subi %in_run, %in_tile : index
  %tile_row = arith.addi %run, %tile_slot : index
  %tile_read = arith.minui %tile_row, %last_row : index
  %shift = arith.subi %tile_row, %tile_read : index
  %kept = arith.addi %in_run, %shift : index
{lines.text()}
}}"""


def _tile(product: ManyRows) -> str:
    """Emit @{name}_tile(x, block, sums, row, slot, first, second, at, from, to, skipped, later).

    It sums the tile of x that begins with `row` times as many vectors of columns as are kept, from column `at` of the
    pair of panels `first` and `second` of the block, along from..to of the block. The block begins at column `skipped`
    of x. The sums go to, or `later` join, those from `slot` on.
    """
    lines, lanes = Lines(), product.lanes
    values, kind = product.multiplied, product.sum_kind
    rows = [lines.let(f"arith.addi %row, {lines.index(i)} : index") for i in range(TILE_ROWS)]
    if product.listed:
        rows = [lines.index_of(f"%order[{row}]", ORDER_TYPE) for row in rows]
    places = _places(lines, product)
    count, zero = TILE_ROWS * product.vectors_per_tile, lines.constant("0" if product.w8a8 else "0.0", lanes, kind)

    def walk(label: str, begin: str, end: str, steps: int, initial: list[str]) -> list[str]:
        names = [f"%{label}{i}" for i in range(count)]
        step = lines.index(steps * values)
        found = lines.begin_loop(f"%{label}", f"%k_{label} = {begin} to {end} step {step}", names, initial, lanes, kind)
        sums = names
        for i in range(steps):
            in_block = lines.let(f"arith.addi %k_{label}, {lines.index(i * values)} : index")
            column = lines.let(f"arith.addi {in_block}, %skipped : index")
            at = lines.let(f"arith.divui {in_block}, {lines.index(values)} : index")
            words = [
                lines.load("%block", f"{panel}, {at}, {where}", product.block_type, lanes, "i32")
                for panel, where in places
            ]
            sums = _step(lines, product, words, rows, column, sums)
        lines.end_loop(sums, lanes, kind)
        return found

    unrolled = lines.index(UNROLL * values)
    length = lines.let("arith.subi %to, %from : index")
    odd = lines.let(f"arith.remui {length}, {unrolled} : index")
    whole = lines.let(f"arith.subi %to, {odd} : index")
    found = walk("s", "%from", whole, UNROLL, [zero] * count)
    found = walk("r", whole, "%to", 1, found)
    _kept(lines, product, found)
    types = f"%x: {product.x_type}, %block: {product.block_type}, %sums: {product.sums_type}"
    numbers = ", ".join(f"%{name}: index" for name in ("row", "slot", "first", "second", "at", "from", "to", "skipped"))
    order = f", %order: {ORDER_TYPE}" if product.listed else ""
    head = f"func.func private @{product.name}_tile({types}, {numbers}, %later: i1{order}) attributes {{no_inline}}"
    return f"{head} {{\n{lines.text()}\nreturn\n}}"


def _step(
    lines: Lines, product: ManyRows, words: list[str], rows: list[str], column: str, sums: list[str]
) -> list[str]:
    """`sums` moved on by vectors of words of the block whose first values stand at `column` of x."""
    if not product.w8a8:
        x = InputRows("%x", product.x_type, product.multiplied_dtype, rows)
        return step_sums(
            lines, words, product.multiplied_dtype, x, column, sums, product.lanes, product.uses_bf16_pairs
        )
    int8 = product.int8_rows
    parts = [unpack_int8(lines, int8, each) if int8.values == product.values_per_word else [each] for each in words]
    at = lines.let(f"arith.divui {column}, {lines.index(int8.values)} : index")
    return panel_sums(lines, int8, parts, Named("x", product.x_type), rows, at, sums)


def _places(lines: Lines, product: ManyRows) -> list[tuple[str, str]]:
    """Return panel and column of each vector of words."""
    if product.vectors_per_tile * product.lanes == PANEL_PAIR:
        columns = range(0, PANEL, product.lanes)
        return [(panel, lines.index(column)) for panel in ("%first", "%second") for column in columns]
    half = lines.index(PANEL)
    inside = lines.let(f"arith.remui %at, {half} : index")
    second = lines.let(f"arith.cmpi uge, %at, {half} : index")
    panel = lines.let(f"arith.select {second}, %second, %first : index")
    columns = range(0, product.vectors_per_tile * product.lanes, product.lanes)
    return [(panel, lines.let(f"arith.addi {inside}, {lines.index(column)} : index")) for column in columns]


def _kept(lines: Lines, product: ManyRows, found: list[str]) -> None:
    """sums[slot + row, at + columns] = found, or += found."""
    lanes, kind = product.lanes, product.sum_kind
    add = "arith.addi" if product.w8a8 else "arith.addf"
    slots = [lines.let(f"arith.addi %slot, {lines.index(i)} : index") for i in range(TILE_ROWS)]
    columns = [lines.let(f"arith.addi %at, {lines.index(i * lanes)} : index") for i in range(product.vectors_per_tile)]
    places = [f"{slot}, {column}" for slot in slots for column in columns]
    lines.emit("scf.if %later {")
    for place, value in zip(places, found, strict=True):
        before = lines.load("%sums", place, product.sums_type, lanes, kind)
        joined = lines.let(f"{add} {before}, {value} : {vector(lanes, kind)}")
        lines.store(joined, "%sums", place, product.sums_type, lanes, kind)
    lines.emit("} else {")
    for place, value in zip(places, found, strict=True):
        lines.store(value, "%sums", place, product.sums_type, lanes, kind)
    lines.emit("}")


def pair_sums(lines: Lines, product: ManyRows, row: str, kept: str) -> list[tuple[str, str]]:
    """A row's sums of one pair of panels, scaled and with their bias: each vector's first column, and the vector."""
    scale = row_scale(lines, product.int8_rows, Named("x", product.x_type), row) if product.w8a8 else None
    start = lines.let(f"arith.muli %pair, {lines.index(PANEL if product.panel_distance else PANEL_PAIR)} : index")
    found = []
    for at in range(0, PANEL_PAIR, product.lanes):
        offset = at if not product.panel_distance or at < PANEL else at - PANEL + product.panel_distance * PANEL
        column = lines.let(f"arith.addi {start}, {lines.index(offset)} : index")
        sums = lines.load("%sums", f"{kept}, {lines.index(at)}", product.sums_type, product.lanes, product.sum_kind)
        found.append((column, finished(lines, product, sums, column, scale)))
    return found


def store_sums(lines: Lines, product: ManyRows, row: str, kept: str) -> None:
    """`Finish`: out[row, columns] = the sums, rounded to the type of `out`."""
    for column, value in pair_sums(lines, product, row, kept):
        rounded = lines.truncate(value, product.lanes, product.out_dtype)
        lines.store(rounded, "%out", f"{row}, {column}", product.out_type, product.lanes, product.out_dtype)


def store_listed(lines: Lines, product: ManyRows, row: str, kept: str) -> None:
    """`Finish`: out[row, columns less the skipped ones] = the sums, rounded to the type of `out`."""
    for column, value in pair_sums(lines, product, row, kept):
        place = lines.let(f"arith.subi {column}, %skipped_columns : index")
        rounded = lines.truncate(value, product.lanes, product.out_dtype)
        lines.store(rounded, "%out", f"{row}, {place}", product.out_type, product.lanes, product.out_dtype)


def add_sums(lines: Lines, product: ManyRows, row: str, kept: str) -> None:
    """`Finish`: out[row, columns] += the sums; `out` is float32."""
    for column, value in pair_sums(lines, product, row, kept):
        before = lines.load("%out", f"{row}, {column}", product.out_type, product.lanes, "f32")
        value = lines.let(f"arith.addf {before}, {value} : {vector(product.lanes)}")
        lines.store(value, "%out", f"{row}, {column}", product.out_type, product.lanes)
