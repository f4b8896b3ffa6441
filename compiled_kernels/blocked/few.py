"""Products of a few rows with a weight in panels as MLIR text: each panel is read once, for all rows, at memory's
pace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from compiled_kernels.blocked.layout import PANEL
from compiled_kernels.blocked.registers import InputRows, group_scales, step_sums
from compiled_kernels.blocked.shape import TILE_ROWS, Panels, rows_type
from compiled_kernels.linear_w8a8.mlir_rows import panel_sums, row_scale, scaled
from compiled_kernels.linear_w8a8.mlir_rows import unpack as unpack_int8
from compiled_kernels.mlir_text import Lines, Named, declare_arguments, largest_divisor, vector

MAX_WIDENED_BYTES = 1 << 19  # bytes of float32 that a thread may hold of bfloat16 rows, so as to widen them once
# Bytes from what is read of a panel to what is fetched meanwhile. Of bfloat16, 1,024 read a tenth faster than 4,096 on
# Zen 3 (medians of 40 rounds in turns); of INT8 they read no faster.
PREFETCH_DISTANCE_BYTES = {"f32": 4096, "bf16": 1024, "i8": 4096, "i4": 4096, "f4": 4096}


class PanelPass(NamedTuple):
    """One of the passes over a panel, each for some of the rows."""

    number: int = 0
    count: int = 1


ONLY_PASS = PanelPass()


@dataclass(frozen=True)
class FewRows(Panels):
    """A product of exactly `rows` rows; with `accumulate` it adds to what `out` holds, which is float32 then."""

    rows: int = 1
    accumulate: bool = False
    out_dtype: str = field(default="f32", kw_only=True)

    @property
    def block(self) -> int:
        """Return the columns that are computed together."""
        return PANEL

    @property
    def rows_per_pass(self) -> int:
        """Return the rows that a panel is multiplied with at once: as many as the registers hold sums for all its
        columns, or `TILE_ROWS` for some of them; passes of about the same number."""
        most = max(TILE_ROWS, TILE_ROWS * self.vectors_per_tile * self.lanes // PANEL)
        return -(-self.rows // -(-self.rows // most))

    @property
    def x_type(self) -> str:
        return self.int8_rows.type(self.rows) if self.w8a8 else rows_type(self.in_features, self.x_dtype, self.rows)

    @property
    def out_type(self) -> str:
        return rows_type(self.out_features, self.out_dtype, self.rows)


def few_text(product: FewRows) -> str:
    """Emit @name(x [rows, width], words, scales, bias (see `weight_types`), out [rows, out] f32, begin, end): the
    output columns from begin to end, both multiples of a panel's."""
    weights = (Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types))
    arguments = declare_arguments([Named("x", product.x_type), *weights, Named("out", product.out_type)])
    lines = Lines()
    x = _widened(lines, product)
    lines.emit(f"scf.for %o = %begin to %end step {lines.index(PANEL)} {{")
    panel = lines.let(f"arith.divui %o, {lines.index(PANEL)} : index")
    firsts = range(0, product.rows, product.rows_per_pass)
    for number, first in enumerate(firsts):
        rows = [lines.index(row) for row in range(first, min(first + product.rows_per_pass, product.rows))]
        panel_rows(lines, product, x._replace(rows=rows), panel, rows, passes=PanelPass(number, len(firsts)))
    lines.emit("}")
    head = f"func.func private @{product.name}({arguments}, %begin: index, %end: index) attributes {{no_inline}}"
    return f"{head} {{\n{lines.text()}\nreturn\n}}"


def _widened(lines: Lines, product: FewRows) -> InputRows:
    """Name what sums of float32 read x from: itself, or bfloat16 widened beforehand where that is little memory."""
    if (
        product.w8a8
        or product.uses_bf16_pairs
        or product.x_dtype == "f32"
        or product.rows * product.in_features * 4 > MAX_WIDENED_BYTES
    ):
        return InputRows("%x", product.x_type, product.x_dtype, ())
    kind, lanes = (
        rows_type(product.in_features, "f32", product.rows),
        largest_divisor(product.in_features, product.lanes),
    )
    bounds = [lines.index(bound) for bound in (0, product.rows, 1, product.in_features, lanes)]
    lines.emit(f"%wide = memref.alloca() {{alignment = 64 : i64}} : {kind}")
    lines.emit(f"scf.for %wide_row = {bounds[0]} to {bounds[1]} step {bounds[2]} {{")
    lines.emit(f"scf.for %wide_at = {bounds[0]} to {bounds[3]} step {bounds[4]} {{")
    value = lines.extend(lines.load("%x", "%wide_row, %wide_at", product.x_type, lanes, "bf16"), lanes, "bf16")
    lines.store(value, "%wide", "%wide_row, %wide_at", kind, lanes)
    lines.emit("}\n}")
    return InputRows("%wide", kind, "f32", ())


def panel_rows(
    lines: Lines, product: FewRows, x: InputRows, panel: str, out_rows: Sequence[str], column: str = "%o",
    passes: PanelPass = ONLY_PASS,
) -> None:  # fmt: skip
    """Emit some rows of x times the columns of a panel, the first of which is %o: to `out_rows`, from `column` on."""
    wide = _vectors(product, len(x.rows))
    for at in range(0, PANEL, wide * product.lanes):
        columns = range(at, at + wide * product.lanes, product.lanes)
        found = (
            _integers(lines, product, x.rows, panel, columns, passes)
            if product.w8a8
            else _tile(lines, product, x, panel, columns, passes)
        )
        places = [lines.let(f"arith.addi %o, {lines.index(each)} : index") for each in columns]
        stored = (
            places
            if column == "%o"
            else [lines.let(f"arith.addi {column}, {lines.index(each)} : index") for each in columns]
        )
        _store(lines, product, x.rows, out_rows, places, stored, found)


def _vectors(product: FewRows, rows: int) -> int:
    """Return how many vectors of a panel's columns have their sums kept at once: all of them where the registers hold
    that."""
    whole = PANEL // product.lanes
    return whole if rows * whole <= TILE_ROWS * product.vectors_per_tile else product.vectors_per_tile


def _tile(lines: Lines, product: FewRows, x: InputRows, panel: str, columns: range, passes: PanelPass) -> list[str]:
    """Emit the sums of rows of x with some columns of a panel, along the whole width: a block's sums are in
    registers, and join their totals."""
    lanes, mark, zero = product.lanes, lines.serial, lines.constant("0.0", product.lanes)
    count, block, width = len(x.rows) * len(columns), lines.index(product.k_block), lines.index(product.in_features)
    totals = [f"%t{mark}_{i}" for i in range(count)]
    over = f"%from{mark} = {lines.index(0)} to {width} step {block}"
    found = lines.begin_loop(f"%total{mark}", over, totals, [zero] * count, lanes)
    after = lines.let(f"arith.addi %from{mark}, {block} : index")
    to = lines.let(f"arith.minui {after}, {width} : index")
    sums = _block(lines, product, x, panel, columns, passes, f"%from{mark}", to)
    joined = (lines.let(f"arith.addf {a}, {b} : {vector(lanes)}") for a, b in zip(totals, sums, strict=True))
    lines.end_loop(list(joined), lanes)
    return found


def _block(
    lines: Lines, product: FewRows, x: InputRows, panel: str, columns: range, passes: PanelPass, begin: str, end: str
) -> list[str]:
    """Emit the sums along the width from `begin` to `end`."""
    lanes, mark, zero = product.lanes, lines.serial, lines.constant("0.0", product.lanes)
    names = [f"%s{mark}_{i}" for i in range(len(x.rows) * len(columns))]
    over = f"%k{mark} = {begin} to {end} step {lines.index(product.values_per_word)}"
    found = lines.begin_loop(f"%block{mark}", over, names, [zero] * len(names), lanes)
    at = lines.let(f"arith.divui %k{mark}, {lines.index(product.values_per_word)} : index")
    _fetch(lines, product, panel, at, columns, passes)
    kind = product.weight_types[0]
    words = [lines.load("%w0", f"{panel}, {at}, {lines.index(column)}", kind, lanes, "i32") for column in columns]
    scales = scales_at(lines, product, panel, f"%k{mark}", columns)
    pairs = product.uses_bf16_pairs
    lines.end_loop(step_sums(lines, words, product.weight_dtype, x, f"%k{mark}", names, lanes, pairs, scales), lanes)
    return found


def scales_at(lines: Lines, product: Panels, panel: str, k: str, columns: Iterable[int]) -> list[str]:
    """Emit the scales of a panel's `columns` for the group in which `k` lies; none where groups have no scales."""
    if not product.quant_group:
        return []
    group, kind = lines.let(f"arith.divui {k}, {lines.index(product.quant_group)} : index"), product.weight_types[1]
    places = (f"{panel}, {group}, {lines.index(column)}" for column in columns)
    return [group_scales(lines, "%w1", at, kind, product.weight_dtype, product.lanes) for at in places]


def _integers(
    lines: Lines, product: FewRows, rows: Sequence[str], panel: str, columns: range, passes: PanelPass
) -> list[str]:
    """Sums along the whole width of products of integers, which are exact: there are no blocks to keep apart."""
    lanes, mark, int8 = product.lanes, lines.serial, product.int8_rows
    names = [f"%s{mark}_{i}" for i in range(len(rows) * len(columns))]
    over = (
        f"%k{mark} = {lines.index(0)} to {lines.index(product.in_features)} step {lines.index(product.values_per_word)}"
    )
    found = lines.begin_loop(
        f"%whole{mark}", over, names, [lines.constant("0", lanes, "i32")] * len(names), lanes, "i32"
    )
    at = lines.let(f"arith.divui %k{mark}, {lines.index(product.values_per_word)} : index")
    _fetch(lines, product, panel, at, columns, passes)
    kind = product.weight_types[0]
    words = [lines.load("%w0", f"{panel}, {at}, {lines.index(column)}", kind, lanes, "i32") for column in columns]
    word = lines.let(f"arith.divui %k{mark}, {lines.index(int8.values)} : index")
    parts = [unpack_int8(lines, int8, each) for each in words]
    moved = panel_sums(lines, int8, parts, Named("x", product.x_type), rows, word, names)
    lines.end_loop(moved, lanes, "i32")
    return found


def _fetch(lines: Lines, product: FewRows, panel: str, at: str, columns: range, passes: PanelPass) -> None:
    """Ask for what is read soon: panels lie one behind the other, and the end of one is no end to the memory.

    With several passes the panel is in a cache after the first, and memory would wait for the others: each asks for its
    share of the next panel, from begin to end.
    """
    if passes.count == 1:
        distance = PREFETCH_DISTANCE_BYTES[product.weight_dtype]
        later, nearest = lines.let(f"arith.addi {at}, {lines.index(distance // (4 * PANEL))} : index"), 3
    else:
        words = product.in_features // product.values_per_word
        done = lines.let(f"arith.addi {at}, {lines.index(passes.number * words)} : index")
        later = lines.let(f"arith.divui {done}, {lines.index(passes.count)} : index")
        panel, nearest = lines.let(f"arith.addi {panel}, {lines.index(1)} : index"), 2
    for column in range(columns.start, columns.stop, 16):
        place, kind = f"{panel}, {later}, {lines.index(column)}", product.weight_types[0]
        lines.emit(f"memref.prefetch %w0[{place}], read, locality<{nearest}>, data : {kind}")


def _store(
    lines: Lines, product: FewRows, rows: Sequence[str], out_rows: Sequence[str], columns: Sequence[str],
    stored: Sequence[str], totals: Sequence[str],
) -> None:  # fmt: skip
    """Emit out[out row, stored columns] = total of the weight's columns * scale + bias (+ what it held)."""
    lanes, left = product.lanes, iter(totals)
    for row, out_row in zip(rows, out_rows, strict=True):
        scale = row_scale(lines, product.int8_rows, Named("x", product.x_type), row) if product.w8a8 else None
        for column, place in zip(columns, stored, strict=True):
            value = finished(lines, product, next(left), column, scale)
            if product.accumulate:
                before = lines.load("%out", f"{out_row}, {place}", product.out_type, lanes, "f32")
                value = lines.let(f"arith.addf {before}, {value} : {vector(lanes)}")
            value = lines.truncate(value, lanes, product.out_dtype)
            lines.store(value, "%out", f"{out_row}, {place}", product.out_type, lanes, product.out_dtype)


def finished(lines: Lines, product: Panels, sums: str, column: str, row: tuple[str, str] | None = None) -> str:
    """Sums of the columns from `column` on, times their scales where there are such, and their bias added; with `w8a8`,
    of a row with that scale and that added to its sums."""
    lanes, types = product.lanes, product.weight_types
    if row:
        sums = scaled(lines, sums, *row, lanes)
    if product.weight_dtype == "i8" and not product.quant_group:
        scales = lines.load("%w1", column, types[1], lanes, "f32")
        sums = lines.let(f"arith.mulf {sums}, {scales} : {vector(lanes)}")
    if product.bias:
        place = len(types) - 1
        bias = lines.extend(
            lines.load(f"%w{place}", column, types[place], lanes, product.x_dtype), lanes, product.x_dtype
        )
        sums = lines.let(f"arith.addf {sums}, {bias} : {vector(lanes)}")
    return sums
