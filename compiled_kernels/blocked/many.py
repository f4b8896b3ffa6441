"""Multiply many rows with a weight stored in panels, blocks of 32 output columns (see layout.py). A tile's sums stay in
registers, a block of the weight in cache.

    for each run of rows (at most `MAX_RUN_ROWS`, of one thread)
      for each pair of panels
        for each block along the width
          [unpack the block into numbers, once for all rows]
          for each tile of 6 rows:  @{name}_tile  sums of tile x pair in registers, added to `sums`
                                    @{name}_prefetch  prefetch a part of the next block
        finish: process the pair's sums (see `Finish`)

A block of the weight (two panels of `k_block`) stays in the nearest caches while all rows of the run are multiplied
with it. If the tile cannot multiply the stored form, the block is first unpacked into the thread's scratch block:
float32 or pairs of bfloat16, and for codes in groups also scales and minima. (Goto and van de Geijn, 2008, without
packing data that is already in order.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compiled_kernels.blocked.few import Source, Sums, group_sum, input_rows, run_totals, weight_names
from compiled_kernels.blocked.layout import PANEL, PANEL_PAIR
from compiled_kernels.blocked.many_rows import MAX_RUN_ROWS, Done, Finish, ManyRows, listed_arguments
from compiled_kernels.blocked.numbers import half_floats, parts, scales_at, unit_words
from compiled_kernels.blocked.registers import step_sums
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.builder.functions import alloca, call, function, loop, when
from compiled_kernels.builder.target import Named, indices
from compiled_kernels.builder.values import Value, constant, index

UNROLL = 4  # steps along the width between two branches: one column of float32, or a pair of bfloat16


class RowRun(NamedTuple):
    """The run of rows that is computed: the function's arguments by name, the tiles' inputs, the sums, the first row,
    the number of rows, and the last row at which a tile may begin.
    """

    given: dict[str, Value]
    read: dict[str, Value]
    sums: Value
    first: Value
    rows: Value
    last: Value

    def named(self, row: Value) -> Value:
        """Return the index in x and out of row number `row`: the list's entry if there is a list of rows, else `row`
        itself.
        """
        return self.given["order"][row].to("index") if "order" in self.given else row


def many(product: ManyRows, finish: Finish) -> None:
    """Build the function @name(x [row, width], words, scales, bias, out [row, columns], begin, end, rows), which
    computes the rows from begin to end of all `rows`. It may read rows of x outside of them.
    """
    _tile(product)
    _prefetch(product)
    given = [Named("x", product.x_type), *weight_names(product), Named("out", product.out_type)]
    given += listed_arguments() if product.listed else []
    bounds = indices("begin", "end", "rows")
    with function(product.name, [*given, *bounds], inline=False) as values:
        sums = alloca(product.sums_type)
        read = {name: alloca(kind) for name, kind in product.read} if not product.in_place else {"block": values["w0"]}
        begin, end = values["begin"], values["end"]
        with when(begin.below(end)):
            each = even_runs(begin, end)
            with loop(begin, end, each) as turn:
                rows = (turn.index + each).minimum(end) - turn.index
                run = RowRun(values, read, sums, turn.index, rows, values["rows"] - TILE_ROWS)
                if "x_sums" in read:
                    _sum_x(product, run)
                some = (values["first_pair"], values["pair_end"]) if product.listed else (0, product.panels_apart[0])
                with loop(*some) as pair:
                    _pair(product, run, pair.index)
                    _finish(product, run, pair.index, finish)


def even_runs(begin: Value, end: Value) -> Value:
    """Return the number of rows per run if the rows from begin to end are split into runs of whole tiles, of about
    equal length and at most `MAX_RUN_ROWS`. A short last run would read the whole weight for few rows.
    """
    mine = end - begin
    even = _ceil(mine, _ceil(mine, MAX_RUN_ROWS))
    return _ceil(even, TILE_ROWS) * TILE_ROWS


def _ceil(count: Value, each: Value | int) -> Value:
    return (count + each - 1) // each


def _sum_x(product: ManyRows, run: RowRun) -> None:
    """Sum x over each group for the run's rows, in the tiles' layout."""
    with loop(0, run.rows, TILE_ROWS) as slot:
        first = (run.first + slot.index).minimum(run.last)
        with loop(0, TILE_ROWS) as i, loop(0, product.in_features // product.group) as group:
            row = run.named(first + i.index)
            found = group_sum(product, run.given["x"], row, group.index * product.group)
            run.read["x_sums"][slot.index + i.index, group.index] = found


def _pair(product: ManyRows, run: RowRun, pair: Value) -> None:
    """Emit the sums of the run's rows with one pair of panels."""
    zero, one = index(0), index(1)
    _, between, apart = product.panels_apart
    first = pair * between
    second = first + apart
    step = product.vectors_per_tile * product.lanes
    with loop(0, product.in_features, product.k_block) as block:
        k = block.index
        k_end = (k + product.k_block).minimum(product.in_features)
        place = (first, second, k, k_end, zero) if product.in_place else (zero, one, zero, k_end - k, k)
        if not product.in_place:
            _unpack(product, run, (first, second), k, k_end)
        *following, fetched_rows, each = _next_block(product, run, first, k_end)
        with loop(0, PANEL_PAIR, step) as at:
            fetched = zero.below(at.index).select(zero, fetched_rows)
            with loop(0, run.rows, TILE_ROWS) as slot:
                row = (run.first + slot.index).minimum(run.last)
                panels, (start, end, skipped) = place[:2], place[2:]
                given = [*panels, at.index, start, end, skipped, zero.below(k)]
                order = [run.given[name] for name, _ in product.order]
                memories = [run.given["x"], *run.read.values(), run.sums, *order]
                call(f"{product.name}_tile", [*memories, row, slot.index, *given])
                begin = slot.index // TILE_ROWS * each
                call(f"{product.name}_prefetch", [run.given["w0"], *following, begin, (begin + each).minimum(fetched)])


def _next_block(product: ManyRows, run: RowRun, first: Value, k_after: Value) -> list[Value]:
    """Return the location of the next block (its panels and first row of words; arbitrary after the last block), its
    number of word rows, and how many of them are prefetched with each tile, in the first pass over the tiles only.
    """
    _, between, apart = product.panels_apart
    more_here = k_after.below(product.in_features)
    beyond = first + between
    if product.listed:  # another expert's weights are never prefetched: after the last pair, prefetch that pair again
        beyond = beyond.minimum((run.given["pair_end"] - 1) * between)
    next_first = more_here.select(first, beyond)
    next_k = more_here.select(k_after, index(0))
    block_rows = index(-(-product.k_block * product.row_words // product.in_features))
    at = next_k * product.row_words // product.in_features
    return [next_first, next_first + apart, at, block_rows, _ceil(block_rows, _ceil(run.rows, TILE_ROWS))]


def _prefetch(product: ManyRows) -> None:
    """Emit @{name}_prefetch(words, first, second, at, from, to), which prefetches rows `from` to `to` of the block that
    begins with row `at` of the panels `first` and `second`, into the second-level cache.
    """
    numbers = indices("first", "second", "at", "from", "to")
    named = function(f"{product.name}_prefetch", [Named("w0", product.weight_types[0]), *numbers])
    with named as given, loop(given["from"], given["to"]) as turn:
        row = given["at"] + turn.index
        for panel in (given["first"], given["second"]):
            for column in range(0, PANEL, 16):
                given["w0"].prefetch(panel, row, column, nearest=2)


def _unpack(product: ManyRows, run: RowRun, panels: tuple[Value, Value], k: Value, k_end: Value) -> None:
    """Store both panels from k to k_end in the scratch block, in the tile's form."""
    weights, lanes = [run.given[each.name] for each in weight_names(product)], product.lanes
    columns = [(side, panel, column) for side, panel in enumerate(panels) for column in range(0, PANEL, lanes)]
    with loop(k, k_end, product.unit) as turn:
        first = (turn.index - k) // product.multiplied
        for side, panel, column in columns:
            words = _as_multiplied(product, unit_words(product, weights[0], panel, turn.index, column))
            for i, word in enumerate(words):
                run.read["block"].store(word, side, first + i, column)
    if product.group:
        with loop(k, k_end, product.group) as turn:
            group = (turn.index - k) // product.group
            for side, panel, column in columns:
                found = scales_at(product, weights, panel, turn.index, column)
                for name, value in zip(("scales", "minima"), found, strict=False):
                    run.read[name].store(value, side, group, column)


def _as_multiplied(product: ManyRows, words: list[Value]) -> list[Value]:
    """Return a unit's words as vectors of words that the tile multiplies."""
    return [part.bits("i32") for part in parts(product, words)]


def _finish(product: ManyRows, run: RowRun, pair: Value, finish: Finish) -> None:
    """Finish the sums of every row of the run. A tile that would end beyond the last row begins earlier, and its rows
    are later in the sums by the same number.
    """
    with loop(0, run.rows) as turn:
        tile_row = run.first + (turn.index - turn.index % TILE_ROWS)
        kept = turn.index + (tile_row - tile_row.minimum(run.last))
        finish(product, Done(run.given, run.sums, run.named(run.first + turn.index), kept, pair))


def _tile(product: ManyRows) -> None:
    """Emit @{name}_tile(x, block, [scales, minima, sums of x,] sums, [order,] row, slot, first, second, at, from, to,
    skipped, later).

    It multiplies the tile of x that begins at `row` with `vectors_per_tile` vectors of columns, from column `at` of the
    pair of panels `first` and `second` of the block, along from..to of the block. The block begins at column `skipped`
    of x. The sums are stored from `slot` on, or, if `later`, added there.
    """
    numbers = indices("row", "slot", "first", "second", "at", "from", "to", "skipped")
    memories = [Named("x", product.x_type), *product.read, Named("sums", product.sums_type), *product.order]
    with function(f"{product.name}_tile", [*memories, *numbers, Named("later", "i1")], inline=False) as given:
        rows = [given["row"] + i for i in range(TILE_ROWS)]
        rows = [given["order"][row].to("index") for row in rows] if product.listed else rows
        places = _places(product, given)
        slots = [given["slot"] + i for i in range(TILE_ROWS)]
        columns = [given["at"] + i * product.lanes for i in range(product.vectors_per_tile)]
        kept = [(slot, column) for slot in slots for column in columns]
        if product.group:
            _grouped_tile(product, given, rows, places, slots, kept)
        else:
            _plain_tile(product, given, rows, places, kept)


def _plain_tile(
    product: ManyRows, given: dict[str, Value], rows: Sequence[Value], places: Sequence[tuple[Value, Value]],
    kept: Sequence[tuple[Value, Value]],
) -> None:  # fmt: skip
    values, zero = product.multiplied, constant(0, product.sum_kind, product.lanes)

    def walk(begin: Value, end: Value, steps: int, initial: Sequence[Value]) -> list[Value]:
        with loop(begin, end, steps * values, initial) as turn:
            sums = turn.carried
            for i in range(steps):
                at = turn.index + i * values
                words = [given["block"].load(product.lanes, panel, at // values, where) for panel, where in places]
                numbers = [_as_numbers(product, word) for word in words]
                sums = step_sums(numbers, input_rows(product, given["x"], rows), at + given["skipped"], sums)
            turn.carry(sums)
        return turn.results

    whole = given["to"] - (given["to"] - given["from"]) % (UNROLL * values)
    found = walk(given["from"], whole, UNROLL, [zero] * len(kept))
    found = walk(whole, given["to"], 1, found)
    memory = given["sums"]
    with when(given["later"]) as otherwise:
        for place, value in zip(kept, found, strict=True):
            memory.store(memory.load(product.lanes, *place) + value, *place)
    with otherwise():
        for place, value in zip(kept, found, strict=True):
            memory.store(value, *place)


def _grouped_tile(
    product: ManyRows, given: dict[str, Value], rows: Sequence[Value], places: Sequence[tuple[Value, Value]],
    slots: Sequence[Value], kept: Sequence[tuple[Value, Value]],
) -> None:  # fmt: skip
    """Add each run of whole groups to the sums in memory, which are zero before the first."""
    memory, lanes, zero = given["sums"], product.lanes, constant(0.0, "f32", product.lanes)
    with when(given["later"]) as otherwise:
        pass
    with otherwise():
        for place in kept:
            memory.store(zero, *place)

    def unit(at: Value) -> list[list[Value]]:
        words = range(product.unit // product.multiplied)
        loaded = [
            [given["block"].load(lanes, panel, at // product.multiplied + i, where) for i in words]
            for panel, where in places
        ]
        kind = "i32" if product.w8a8 else "bf16" if product.uses_bf16_pairs else "f32"
        return [[word.bits(kind) for word in each] for each in loaded]

    def scales(at: Value) -> list[list[Value]]:
        names = [name for name in ("scales", "minima") if name in given]
        return [
            [given[name].load(lanes, panel, at // product.group, where) for name in names] for panel, where in places
        ]

    with loop(given["from"], given["to"], product.run) as turn:
        column = turn.index + given["skipped"]
        totals = [memory.load(lanes, *place) for place in kept]
        of = Sums(input_rows(product, given["x"], rows), given.get("x_sums"), slots, column)
        found = run_totals(product, Source(unit, scales), of, turn.index, totals)
        for place, value in zip(kept, found, strict=True):
            memory.store(value, *place)


def _as_numbers(product: ManyRows, word: Value) -> list[Value]:
    """Convert a vector of words of the block to parts (see numbers.py)."""
    if product.w8a8:
        return parts(product, [word]) if product.in_place else [word]
    if product.multiplied_dtype == "f32":
        return [word.bits("f32")]
    return [word.bits("bf16")] if product.uses_bf16_pairs else half_floats(word)


def _places(product: ManyRows, given: dict[str, Value]) -> list[tuple[Value, Value]]:
    """Return panel and column of each vector of words."""
    if product.vectors_per_tile * product.lanes == PANEL_PAIR:
        columns = range(0, PANEL, product.lanes)
        return [(panel, index(column)) for panel in (given["first"], given["second"]) for column in columns]
    inside = given["at"] % PANEL
    panel = given["at"].below(PANEL).select(given["first"], given["second"])
    return [(panel, inside + i * product.lanes) for i in range(product.vectors_per_tile)]
