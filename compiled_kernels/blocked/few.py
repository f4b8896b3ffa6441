"""Products of a few rows with a weight in panels: each panel is read once, for all rows, at memory's pace.

for each panel:  totals = 0
  for each run of the width:  sums = products of the run, begun at zero
                              totals += sums * scale [+ minimum * sum of x]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from compiled_kernels.blocked.int8_rows import scale_at, sum_at
from compiled_kernels.blocked.layout import PANEL
from compiled_kernels.blocked.numbers import parts, scales_at, unit_words
from compiled_kernels.blocked.registers import InputRows, step_sums
from compiled_kernels.blocked.shape import TILE_ROWS, Panels, rows_type
from compiled_kernels.builder.functions import alloca, function, loop
from compiled_kernels.builder.target import Named, largest_divisor, memref
from compiled_kernels.builder.values import Value, constant, fma, index
from compiled_kernels.builder.vectors import total

MAX_WIDENED_BYTES = 1 << 19  # bytes of float32 that a thread may hold of bfloat16 rows, so as to widen them once
# Bytes from what is read of a panel to what is fetched meanwhile. Of bfloat16, 1,024 read a tenth faster than 4,096 on
# Zen 3 (medians of 40 rounds in turns); of INT8 they read no faster.
PREFETCH_DISTANCE_BYTES = {"bf16": 1024}
OTHER_PREFETCH_DISTANCE_BYTES = 4096


class PanelPass(NamedTuple):
    """One of the passes over a panel, each for some of the rows."""

    number: int = 0
    count: int = 1


ONLY_PASS = PanelPass()


class Operands(NamedTuple):
    """Hold what a product works with: rows of x, the weight's words, scales, minima and bias, and where results go; the
    sums of x of each group [row, group], where there are minima, and their rows, where they are others than x's."""

    x: Value
    weights: Sequence[Value]
    out: Value
    x_sums: Value | None = None
    sum_rows: Sequence[Value] | None = None


@dataclass(frozen=True)
class FewRows(Panels):
    """A product of exactly `rows` rows; with `accumulate` it adds to what `out` holds, which is float32 then. `out` has
    `columns` columns unless that is 0, of which those from `first_column` on are this weight's."""

    rows: int = 1
    accumulate: bool = False
    out_dtype: str = field(default="f32", kw_only=True)
    columns: int = field(default=0, kw_only=True)
    first_column: int = field(default=0, kw_only=True)

    @property
    def block(self) -> int:
        """Return the columns that are computed together."""
        return PANEL

    @property
    def rows_per_pass(self) -> int:
        """Return the rows that a panel is multiplied with at once: as many as the registers hold sums for all its
        columns (and totals, of groups), or `TILE_ROWS` for some of them; passes of about the same number."""
        most = max(TILE_ROWS, TILE_ROWS * self.vectors_per_tile * self.lanes // PANEL // (2 if self.group else 1))
        return -(-self.rows // -(-self.rows // most))

    @property
    def x_type(self) -> str:
        return self.int8_rows.type(self.rows) if self.w8a8 else rows_type(self.in_features, self.x_dtype, self.rows)

    @property
    def out_type(self) -> str:
        return rows_type(self.columns or self.out_features, self.out_dtype, self.rows)


def weight_names(product: Panels) -> list[Named]:
    """Return the weight's arguments of a product's function."""
    return [Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types)]


def few(product: FewRows) -> None:
    """Make @name(x [rows, width], words, scales, bias (see `weight_types`), out [rows, out] f32, begin, end): the
    output columns from begin to end, both multiples of a panel's."""
    weights = weight_names(product)
    bounds = Named("begin", "index"), Named("end", "index")
    arguments = [Named("x", product.x_type), *weights, Named("out", product.out_type), *bounds]
    with function(product.name, arguments, inline=False) as given:
        operands = prepared(product, given, product.rows)
        with loop(given["begin"], given["end"], PANEL) as turn:
            firsts = range(0, product.rows, product.rows_per_pass)
            for number, first in enumerate(firsts):
                rows = range(first, min(first + product.rows_per_pass, product.rows))
                places = [turn.index.like(row) for row in rows]
                passes = PanelPass(number, len(firsts))
                panel_rows(product, operands, turn.index, places, places, turn.index + product.first_column, passes)


def prepared(product: FewRows, given: dict[str, Value], rows: int) -> Operands:
    """Return a function's arguments as operands: x widened beforehand, where sums are of float32 and that is little
    memory, and its sums."""
    weights = [given[each.name] for each in weight_names(product)]
    x = given["x"]
    sums = x_sums(product, x, rows, 0, rows) if product.has_minima and not product.w8a8 else None
    narrow = product.w8a8 or product.uses_bf16_pairs or product.x_dtype == "f32"
    if not narrow and rows * product.in_features * 4 <= MAX_WIDENED_BYTES:
        wide = alloca(rows_type(product.in_features, "f32", rows))
        lanes = largest_divisor(product.in_features, product.lanes)
        with loop(0, rows) as row, loop(0, product.in_features, lanes) as at:
            wide.store(x.load(lanes, row.index, at.index), row.index, at.index)
        x = wide
    return Operands(x, weights, given["out"], sums)


def x_sums(
    product: Panels, x: Value, kept: int, begin: Value | int, end: Value | int,
    row_at: Callable[[Value], Value] = lambda place: place,
) -> Value:  # fmt: skip
    """Return the sum of x of each group of the rows at places from `begin` to `end`, which are `kept` at most."""
    groups = product.in_features // product.group
    found = alloca(memref((kept, groups), "f32"))
    with loop(begin, end) as place, loop(0, groups) as group:
        sums = group_sum(product, x, row_at(place.index), group.index * product.group)
        found[place.index - begin, group.index] = sums
    return found


def group_sum(product: Panels, x: Value, row: Value, at: Value) -> Value:
    """Return the sum of a row's numbers of the group at `at`."""
    lanes = largest_divisor(product.group, 16)
    vectors = (x.load(lanes, row, at + i).to("f32") for i in range(0, product.group, lanes))
    found = next(vectors)
    for each in vectors:
        found = found + each
    return total(found)


def panel_rows(
    product: FewRows, operands: Operands, column: Value, rows: Sequence[Value], out_rows: Sequence[Value],
    stored_from: Value, passes: PanelPass = ONLY_PASS,
) -> None:  # fmt: skip
    """Multiply some rows of x with the columns of the panel that begins with `column`: to `out_rows`, from the column
    `stored_from` on."""
    panel, wide = column // PANEL, _vectors(product, len(rows))
    for at in range(0, PANEL, wide * product.lanes):
        columns = range(at, at + wide * product.lanes, product.lanes)
        found = _totals(product, operands, rows, panel, columns, passes)
        _store(product, operands, rows, out_rows, [(column + each, stored_from + each) for each in columns], found)


def _vectors(product: FewRows, rows: int) -> int:
    """Return how many vectors of a panel's columns have their sums kept at once: all of them where the registers hold
    that."""
    whole = PANEL // product.lanes
    return whole if rows * whole <= TILE_ROWS * product.vectors_per_tile else product.vectors_per_tile


def _totals(
    product: FewRows, operands: Operands, rows: Sequence[Value], panel: Value, columns: range, passes: PanelPass
) -> list[Value]:
    """Return the sums of rows of x with some columns of a panel, along the whole width."""
    zero = [constant(0, product.sum_kind, product.lanes)] * (len(rows) * len(columns))
    x = input_rows(product, operands.x, rows)

    def unit(at: Value) -> list[list[Value]]:
        _prefetch(product, operands.weights[0], panel, at, columns, passes)
        words = [unit_words(product, operands.weights[0], panel, at, column) for column in columns]
        return [parts(product, each) for each in words]

    def scales(at: Value) -> list[list[Value]]:
        return [scales_at(product, operands.weights, panel, at, each) for each in columns]

    with loop(0, product.in_features, product.run, zero) as turn:
        if not product.group:
            end = (turn.index + product.run).minimum(product.in_features)
            with loop(turn.index, end, product.unit, zero) as inner:
                inner.carry(step_sums(unit(inner.index), x, inner.index, inner.carried))
            turn.carry([a + b for a, b in zip(turn.carried, inner.results, strict=True)])
        else:
            of_x = Sums(x, operands.x_sums, operands.sum_rows or rows, turn.index)
            turn.carry(run_totals(product, Source(unit, scales), of_x, turn.index, turn.carried))
    return turn.results


class Source(NamedTuple):
    """Give what a run of the weight is read from: at a place of it the parts of a unit, and the scale (and minimum) of
    a group, for each vector of columns."""

    unit: Callable[[Value], list[list[Value]]]
    scales: Callable[[Value], list[list[Value]]]


class Sums(NamedTuple):
    """Rows of x from a column on, and where the sums of x of their groups are, if these are wanted."""

    x: InputRows
    x_sums: Value | None
    sum_rows: Sequence[Value]
    column: Value


def run_totals(product: Panels, source: Source, of: Sums, at: Value, totals: Sequence[Value]) -> list[Value]:
    """Return `totals` and the products of a run of whole groups, which begins at `at` of the `source`."""
    zero = [constant(0, "i32" if product.w8a8 else "f32", product.lanes)] * len(totals)
    if product.run > product.unit:
        with loop(0, product.run, product.unit, zero) as inner:
            inner.carry(step_sums(source.unit(at + inner.index), of.x, of.column + inner.index, inner.carried))
        return _joined(product, inner.results, source.scales(at), of, totals)
    whole, found = source.unit(at), list(totals)
    group = product.sum_group
    each = len(whole[0]) * group // product.unit  # parts of a group
    for i in range(product.unit // group):
        here = of._replace(column=of.column + i * group)
        sums = step_sums([parts[i * each : (i + 1) * each] for parts in whole], here.x, here.column, zero)
        found = _joined(product, sums, source.scales(at + i * group), here, found)
    return found


def _joined(
    product: Panels, sums: Sequence[Value], scales: Sequence[Sequence[Value]], of: Sums, totals: Sequence[Value]
) -> list[Value]:
    """Return `totals` and the sums of a group, times its scale, and its minimum times the sum of x."""
    if product.w8a8:
        return _joined_integers(product, sums, scales, of, totals)
    found = []
    for row, place in enumerate(of.sum_rows):
        of_x = None if of.x_sums is None else of.x_sums[place, of.column // product.group].broadcast(product.lanes)
        for i, (scale, *minimum) in enumerate(scales):
            at = row * len(scales) + i
            value = fma(sums[at], scale, totals[at])
            found.append(fma(of_x, minimum[0], value) if of_x is not None else value)
    return found


def _joined_integers(
    product: Panels, sums: Sequence[Value], scales: Sequence[Sequence[Value]], of: Sums, totals: Sequence[Value]
) -> list[Value]:
    """Do as `_joined` does with sums of integers, each operation rounded by itself."""
    found, rows = [], product.int8_rows
    for row, place in enumerate(of.x.rows):
        for i, (scale, *minimum) in enumerate(scales):
            at = row * len(scales) + i
            value = totals[at] + scaled(product, sums[at], of.x.memory, place, of.column) * scale
            if minimum:
                whole = sum_at(rows, of.x.memory, place, of.column).broadcast(product.lanes).to("f32")
                value = (
                    value + whole * scale_at(rows, of.x.memory, place, of.column).broadcast(product.lanes) * minimum[0]
                )
            found.append(value)
    return found


def scaled(product: Panels, sums: Value, x: Value, row: Value, column: Value) -> Value:
    """Return a vector of a row's int32 sums of the group that begins with this column as float32, times x's scale."""
    rows, lanes = product.int8_rows, product.lanes
    if product.added_to_codes:
        sums = sums + (sum_at(rows, x, row, column) * -product.added_to_codes).broadcast(lanes)
    return sums.to("f32") * scale_at(rows, x, row, column).broadcast(lanes)


def input_rows(product: Panels, x: Value, rows: Sequence[Value]) -> InputRows:
    """Return these rows of x, which with `w8a8` are in INT8."""
    return InputRows(x, rows, product.int8_rows if product.w8a8 else None)


def _prefetch(product: FewRows, memory: Value, panel: Value, at: Value, columns: range, passes: PanelPass) -> None:
    """Ask for what is read soon: panels lie one behind the other, and the end of one is no end to the memory.

    With several passes the panel is in a cache after the first, and memory would wait for the others: each asks for its
    share of the next panel, from begin to end.
    """
    words = product.unit_words
    at = at // product.unit * words  # about: words of sub-scales stand between
    nearest = 3
    if passes.count == 1:
        distance = PREFETCH_DISTANCE_BYTES.get(product.weight_dtype, OTHER_PREFETCH_DISTANCE_BYTES)
        later = at + distance // (4 * PANEL)
    else:
        later = (at + passes.number * product.row_words) // passes.count
        panel, nearest = panel + 1, 2
    for i in range(words):
        for column in range(columns.start, columns.stop, 16):
            memory.prefetch(panel, later + i, column, nearest=nearest)


def _store(
    product: FewRows, operands: Operands, rows: Sequence[Value], out_rows: Sequence[Value],
    places: Sequence[tuple[Value, Value]], totals: Sequence[Value],
) -> None:  # fmt: skip
    """Store out[out row, stored columns] = total of the weight's columns * scale + bias (+ what it held)."""
    out, left = operands.out, iter(totals)
    for row, out_row in zip(rows, out_rows, strict=True):
        for column, place in places:
            mask = columns_there(product, column, PANEL)
            value = finished(product, operands.weights, next(left), column, operands.x, row)
            if product.accumulate:
                value = out.load(product.lanes, out_row, place, mask=mask) + value
            out.store(value, out_row, place, mask=mask)


def columns_there(product: Panels, column: Value, whole: int) -> Value | None:
    """Return which columns of a vector from `column` on the weight has; None where all vectors are whole, as they are
    of a multiple of `whole` columns."""
    if product.out_features % whole == 0:
        return None
    here = column.to("i32").broadcast(product.lanes) + constant(range(product.lanes), "i32")
    return here.below(product.out_features)


def finished(product: Panels, weights: Sequence[Value], sums: Value, column: Value, x: Value, row: Value) -> Value:
    """Return sums of a row of x, of the columns from `column` on, times their scales (and that of a row of INT8) where
    rows have such, and their bias added."""
    if product.w8a8 and product.scales_rows:
        sums = scaled(product, sums, x, row, index(0))
    if product.scales_rows:
        sums = sums * weights[1].load(product.lanes, column)
    if product.bias:
        sums = sums + weights[-1].load(product.lanes, column).to("f32")
    return sums
