"""Multiply up to about six rows with a weight stored in panels, blocks of 32 output columns (see layout.py). Each panel
is read once for all rows, at memory bandwidth.

for each panel:  totals = 0
  for each run of the width:  sums = products of the run, starting at zero
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

MAX_WIDENED_BYTES = 1 << 19  # maximum bytes per thread for bfloat16 rows widened once to float32
# Distance in bytes from the position read in a panel to the prefetched one. For bfloat16, 1,024 is a tenth faster
# than 4,096 on Zen 3 (medians of 40 alternating rounds); for INT8 it is no faster.
PREFETCH_DISTANCE_BYTES = {"bf16": 1024}
OTHER_PREFETCH_DISTANCE_BYTES = 4096


class PanelPass(NamedTuple):
    """The number of a pass over a panel, and the count of passes: each pass multiplies some of the rows."""

    number: int = 0
    count: int = 1


ONLY_PASS = PanelPass()


class Operands(NamedTuple):
    """The operands of a product: the rows of x, the weight's tensors (words, scales, minima, bias) and the output. With
    minima there are also the sums of x over each group of columns [row, group], and the indices of these sums' rows if
    they differ from those of x.
    """

    x: Value
    weights: Sequence[Value]
    out: Value
    x_sums: Value | None = None
    sum_rows: Sequence[Value] | None = None


@dataclass(frozen=True)
class FewRows(Panels):
    """The product of exactly `rows` rows with a weight in panels. With `accumulate` it is added to `out`, which is then
    float32. If `columns` is not 0, `out` has that many columns, and this weight's columns begin at `first_column`.
    """

    rows: int = 1
    accumulate: bool = False
    out_dtype: str = field(default="f32", kw_only=True)
    columns: int = field(default=0, kw_only=True)
    first_column: int = field(default=0, kw_only=True)

    @property
    def block(self) -> int:
        """Return the number of output columns that are computed together."""
        return PANEL

    @property
    def rows_per_pass(self) -> int:
        """Return the number of rows multiplied with a panel at once. Their sums (and totals, with groups) fit in
        registers for all of its columns, or up to `TILE_ROWS` rows for some of its columns. Passes have about equal
        numbers of rows.
        """
        most = max(TILE_ROWS, TILE_ROWS * self.vectors_per_tile * self.lanes // PANEL // (2 if self.group else 1))
        return -(-self.rows // -(-self.rows // most))

    @property
    def x_type(self) -> str:
        return self.int8_rows.type(self.rows) if self.w8a8 else rows_type(self.in_features, self.x_dtype, self.rows)

    @property
    def out_type(self) -> str:
        return rows_type(self.columns or self.out_features, self.out_dtype, self.rows)


def weight_names(product: Panels) -> list[Named]:
    """Return the weight's arguments in a product's function."""
    return [Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types)]


def few(product: FewRows) -> None:
    """Build the function @name(x [rows, width], words, scales, bias (see `weight_types`), out [rows, out] f32, begin,
    end), which computes the output columns from begin to end, both multiples of a panel's columns.
    """
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
    """Return a function's arguments as operands, with the sums of x that minima need. If sums are float32 and x is
    small, x is converted to float32 first.
    """
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
    """Return the sums of x over each group of columns [row, group], for the rows at the indices `begin` to `end`, which
    are at most `kept` rows.
    """
    groups = product.in_features // product.group
    found = alloca(memref((kept, groups), "f32"))
    with loop(begin, end) as place, loop(0, groups) as group:
        sums = group_sum(product, x, row_at(place.index), group.index * product.group)
        found[place.index - begin, group.index] = sums
    return found


def group_sum(product: Panels, x: Value, row: Value, at: Value) -> Value:
    """Return the sum of one row of x over the group of columns that begins at `at`."""
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
    """Multiply some rows of x with the panel that begins at output column `column`, and store the results in the rows
    `out_rows` of the output, from column `stored_from` on.
    """
    panel, wide = column // PANEL, _vectors(product, len(rows))
    for at in range(0, PANEL, wide * product.lanes):
        columns = range(at, at + wide * product.lanes, product.lanes)
        found = _totals(product, operands, rows, panel, columns, passes)
        _store(product, operands, rows, out_rows, [(column + each, stored_from + each) for each in columns], found)


def _vectors(product: FewRows, rows: int) -> int:
    """Return how many column vectors of a panel are summed at once: all of them if they fit in the registers."""
    whole = PANEL // product.lanes
    return whole if rows * whole <= TILE_ROWS * product.vectors_per_tile else product.vectors_per_tile


def _totals(
    product: FewRows, operands: Operands, rows: Sequence[Value], panel: Value, columns: range, passes: PanelPass
) -> list[Value]:
    """Return the products of rows of x with some columns of a panel, summed along the whole width."""
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
    """Two functions that load a weight at a position of the width, each for every vector of columns: `unit` the parts
    of the unit there, `scales` the scale (and minimum) of the group there.
    """

    unit: Callable[[Value], list[list[Value]]]
    scales: Callable[[Value], list[list[Value]]]


class Sums(NamedTuple):
    """Rows of x from column `column` on, and optionally the sums of x over groups, with the indices of their rows."""

    x: InputRows
    x_sums: Value | None
    sum_rows: Sequence[Value]
    column: Value


def run_totals(product: Panels, source: Source, of: Sums, at: Value, totals: Sequence[Value]) -> list[Value]:
    """Return `totals` plus the products of x with one run of the weight: the whole groups of columns that begin at
    position `at` of `source`.
    """
    zero = [constant(0, "i32" if product.w8a8 else "f32", product.lanes)] * len(totals)
    if product.run > product.unit:
        with loop(0, product.run, product.unit, zero) as inner:
            inner.carry(step_sums(source.unit(at + inner.index), of.x, of.column + inner.index, inner.carried))
        return _joined(product, inner.results, source.scales(at), of, totals)
    whole, found = source.unit(at), list(totals)
    group = product.sum_group
    each = len(whole[0]) * group // product.unit  # number of parts of a group
    for i in range(product.unit // group):
        here = of._replace(column=of.column + i * group)
        sums = step_sums([parts[i * each : (i + 1) * each] for parts in whole], here.x, here.column, zero)
        found = _joined(product, sums, source.scales(at + i * group), here, found)
    return found


def _joined(
    product: Panels, sums: Sequence[Value], scales: Sequence[Sequence[Value]], of: Sums, totals: Sequence[Value]
) -> list[Value]:
    """Return `totals` plus the sums of a group times its scale, plus its minimum times the sum of x."""
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
    """Compute `_joined` for integer sums, with each operation rounded separately."""
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
    """Convert the int32 sums over one group of columns, which begins with `column`, to float32, and multiply them by
    the scale of x.
    """
    rows, lanes = product.int8_rows, product.lanes
    if product.added_to_codes:
        sums = sums + (sum_at(rows, x, row, column) * -product.added_to_codes).broadcast(lanes)
    return sums.to("f32") * scale_at(rows, x, row, column).broadcast(lanes)


def input_rows(product: Panels, x: Value, rows: Sequence[Value]) -> InputRows:
    """Return these rows of x as an operand, with their INT8 layout if `w8a8`."""
    return InputRows(x, rows, product.int8_rows if product.w8a8 else None)


def _prefetch(product: FewRows, memory: Value, panel: Value, at: Value, columns: range, passes: PanelPass) -> None:
    """Prefetch data that is read soon. Panels are contiguous, so the distance may reach into the next panel.

    With several passes the panel is cached after the first pass, and memory would be idle during the others: each pass
        prefetches its share of the next panel.
    """
    words = product.unit_words
    at = at // product.unit * words  # approximate: words of sub-scales are in between
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
    """Return a boolean for each column of the vector at `column`: whether the weight has it. None if the weight has a
    multiple of `whole` columns, so that every vector is complete.
    """
    if product.out_features % whole == 0:
        return None
    here = column.to("i32").broadcast(product.lanes) + constant(range(product.lanes), "i32")
    return here.below(product.out_features)


def finished(product: Panels, weights: Sequence[Value], sums: Value, column: Value, x: Value, row: Value) -> Value:
    """Return the results of one row for the columns from `column` on: its sums, times the columns' scales and the scale
    of an INT8 row where they exist, plus the bias.
    """
    if product.w8a8 and product.scales_rows:
        sums = scaled(product, sums, x, row, index(0))
    if product.scales_rows:
        sums = sums * weights[1].load(product.lanes, column)
    if product.bias:
        sums = sums + weights[-1].load(product.lanes, column).to("f32")
    return sums
