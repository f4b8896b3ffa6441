"""Products of many rows with a weight in panels: sums of tiles in registers, blocks of weights in cache.

    for each run of rows (`MAX_RUN_ROWS` at most, a thread's own)
      for each pair of panels
        for each block along the width
          [unpack the block into numbers, once for all rows]
          for each tile of 6 rows:  @{name}_tile  sums of tile x pair in registers; they join those in `sums`
                                    @{name}_prefetch  ask for a part of the next block, which memory brings meanwhile
        finish: what becomes of the pair's sums (see `Finish`)

A block of the weight (two panels of `k_block`) stays in the nearest caches while all rows of the run go past it. Where
the weight is not stored as the tile multiplies it, the block is first unpacked into a scratch block of the thread's
own: float32, or pairs of bfloat16, and of codes in groups the scales and minima beside them. (Goto and van de Geijn,
2008, without packing what is in order already.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compiled_kernels.blocked.few import (
    Source,
    Sums,
    columns_there,
    finished,
    group_sum,
    input_rows,
    run_totals,
    weight_names,
)
from compiled_kernels.blocked.layout import PANEL, PANEL_PAIR
from compiled_kernels.blocked.numbers import half_floats, parts, scales_at, unit_words
from compiled_kernels.blocked.registers import step_sums
from compiled_kernels.blocked.shape import TILE_ROWS, VALUES_PER_WORD, Panels, rows_type
from compiled_kernels.builder.functions import alloca, call, function, loop, when
from compiled_kernels.builder.target import SIZE_BOUND, Named, memref
from compiled_kernels.builder.values import Value, constant, index

MAX_RUN_ROWS = 384  # a multiple of TILE_ROWS: sums of that many rows times a pair of panels are 96 KiB
UNROLL = 4  # steps along the width between two branches, float32; pairs of bfloat16 take two columns a step
ORDER_TYPE = memref((SIZE_BOUND,), "i64")


@dataclass(frozen=True)
class ManyRows(Panels):
    """A product of any number of rows, at least `TILE_ROWS`. `out` is of `out_dtype` (f32, bf16), has `columns`
    columns unless that is 0, when it has those of the weight. `panel_distance`: the second panel of a pair is that
    many panels after the first, 0 where it is the next. `listed`: the rows of x and out are those that a list names,
    and of the weight some pairs of panels are multiplied (see `listed_arguments`). `first_column`: the column of out
    that is the weight's first."""

    out_dtype: str = "f32"
    columns: int = 0
    panel_distance: int = 0
    listed: bool = False
    first_column: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.panel_distance and self.out_features % PANEL_PAIR:
            raise ValueError(f"{self.name}: {self.out_features} columns are no pairs of panels that stand apart")

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
        if self.group:
            return False
        stored = self.multiplied == 4 if self.w8a8 else self.weight_dtype == self.multiplied_dtype
        return stored and self.vectors_per_tile * self.lanes == PANEL_PAIR

    @property
    def read(self) -> list[Named]:
        """Return what a tile reads its weights from: the weight, or a scratch block with scales and minima beside it;
        and the sums of x of each group, where there are minima."""
        if self.in_place:
            return [Named("block", self.weight_types[0])]
        found = [Named("block", memref((2, self.k_block // self.multiplied, PANEL), "i32"))]
        if self.group:
            beside = memref((2, self.k_block // self.group, PANEL), "f32")
            found.append(Named("scales", beside))
            if self.has_minima:
                found.append(Named("minima", beside))
            if self.has_minima and not self.w8a8:
                x_sums = memref((MAX_RUN_ROWS, self.in_features // self.group), "f32")
                found.append(Named("x_sums", x_sums))
        return found

    @property
    def order(self) -> list[Named]:
        """Return the list that names the rows of x and out, of a `listed` product."""
        return [Named("order", ORDER_TYPE)] * self.listed

    @property
    def panels_apart(self) -> tuple[int, int, int]:
        """Return how many pairs of panels there are, panels from one pair to the next, and from a pair's first to its
        second."""
        distance = self.panel_distance
        return (distance, 1, distance) if distance else (self.panels // 2, 2, 1)


# Arguments of a `listed` product: row i of x and of out is %order[i]; pairs of panels from first_pair to pair_end are
# multiplied, and the weight's column %skipped_columns stands first in out.


def listed_arguments(order: str = ORDER_TYPE) -> list[Named]:
    """Return the arguments of a `listed` product, whose list is of memref type `order`."""
    return [Named("order", order), *(Named(name, "index") for name in ("first_pair", "pair_end", "skipped_columns"))]


class Done(NamedTuple):
    """A row whose sums of one pair of panels are complete: the function's arguments by name, the sums, the row of x and
    out, the row of the sums, the pair."""

    given: dict[str, Value]
    sums: Value
    row: Value
    kept: Value
    pair: Value


Finish = Callable[["ManyRows", Done], None]
"""Makes what becomes of a row's sums of one pair of panels."""


class RowRun(NamedTuple):
    """A run of rows at work: the function's arguments by name, what the tiles read, the sums, the first row, how many
    rows, and the last row with which a tile may begin."""

    given: dict[str, Value]
    read: dict[str, Value]
    sums: Value
    first: Value
    rows: Value
    last: Value

    def named(self, row: Value) -> Value:
        """Return the row of x and out that a row's place in the list names, where there is a list."""
        return self.given["order"][row].to("index") if "order" in self.given else row


def many(product: ManyRows, finish: Finish) -> None:
    """Make @name(x [row, width], words, scales, bias, out [row, columns], begin, end, rows): the rows from begin to
    end of `rows` in all; x may be read, but not written, beyond them."""
    _tile(product)
    _prefetch(product)
    given = [Named("x", product.x_type), *weight_names(product), Named("out", product.out_type)]
    given += listed_arguments() if product.listed else []
    bounds = [Named(name, "index") for name in ("begin", "end", "rows")]
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
    """Return how many rows a run has, where those from begin to end are walked in runs of whole tiles, all about as
    long and of `MAX_RUN_ROWS` at most: a last run of few rows would read the whole weight for them."""
    mine = end - begin
    even = _ceil(mine, _ceil(mine, MAX_RUN_ROWS))
    return _ceil(even, TILE_ROWS) * TILE_ROWS


def _ceil(count: Value, each: Value | int) -> Value:
    return (count + each - 1) // each


def _sum_x(product: ManyRows, run: RowRun) -> None:
    """Sum x of each group of the run's rows, as the tiles take them."""
    with loop(0, run.rows, TILE_ROWS) as slot:
        first = (run.first + slot.index).minimum(run.last)
        with loop(0, TILE_ROWS) as i, loop(0, product.in_features // product.group) as group:
            row = run.named(first + i.index)
            found = group_sum(product, run.given["x"], row, group.index * product.group)
            run.read["x_sums"][slot.index + i.index, group.index] = found


def _pair(product: ManyRows, run: RowRun, pair: Value) -> None:
    """Make sums of the run's rows with one pair of panels."""
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
    """Return where the block after this one lies (its panels, its first row of words; after the last one any place will
    do), how many rows of words it has, and how many of them are fetched beside each tile: in the first of the walks
    over the tiles, none in the others."""
    _, between, apart = product.panels_apart
    more_here = k_after.below(product.in_features)
    beyond = first + between
    if product.listed:  # no other expert's weights are asked for: after the last pair it is asked for again
        beyond = beyond.minimum((run.given["pair_end"] - 1) * between)
    next_first = more_here.select(first, beyond)
    next_k = more_here.select(k_after, index(0))
    block_rows = index(-(-product.k_block * product.row_words // product.in_features))
    at = next_k * product.row_words // product.in_features
    return [next_first, next_first + apart, at, block_rows, _ceil(block_rows, _ceil(run.rows, TILE_ROWS))]


def _prefetch(product: ManyRows) -> None:
    """Make @{name}_prefetch(words, first, second, at, from, to): asks for rows `from` to `to` of the block that begins
    with row `at` of the panels `first` and `second`, for the second cache."""
    numbers = [Named(name, "index") for name in ("first", "second", "at", "from", "to")]
    named = function(f"{product.name}_prefetch", [Named("w0", product.weight_types[0]), *numbers])
    with named as given, loop(given["from"], given["to"]) as turn:
        row = given["at"] + turn.index
        for panel in (given["first"], given["second"]):
            for column in range(0, PANEL, 16):
                given["w0"].prefetch(panel, row, column, nearest=2)


def _unpack(product: ManyRows, run: RowRun, panels: tuple[Value, Value], k: Value, k_end: Value) -> None:
    """Store both panels from k to k_end, as the tile multiplies them, in the scratch block."""
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
    """Finish the sums of every row of the run. A tile that would end beyond the last row of all begins so
    much earlier, and its rows stand that much later in the sums."""
    with loop(0, run.rows) as turn:
        tile_row = run.first + (turn.index - turn.index % TILE_ROWS)
        kept = turn.index + (tile_row - tile_row.minimum(run.last))
        finish(product, Done(run.given, run.sums, run.named(run.first + turn.index), kept, pair))


def _tile(product: ManyRows) -> None:
    """Make @{name}_tile(x, block, [scales, minima, sums of x,] sums, [order,] row, slot, first, second, at, from, to,
    skipped, later).

    It sums the tile of x that begins with `row` times as many vectors of columns as are kept, from column `at` of the
    pair of panels `first` and `second` of the block, along from..to of the block. The block begins at column `skipped`
    of x. The sums go to, or `later` join, those from `slot` on.
    """
    numbers = ("row", "slot", "first", "second", "at", "from", "to", "skipped")
    memories = [Named("x", product.x_type), *product.read, Named("sums", product.sums_type), *product.order]
    bounds = [*(Named(name, "index") for name in numbers), Named("later", "i1")]
    with function(f"{product.name}_tile", [*memories, *bounds], inline=False) as given:
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
    """Each run of whole groups joins the sums in memory; before the first these are zero."""
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
    """Return a vector of words of the block as parts (see numbers.py)."""
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


class Found(NamedTuple):
    """A vector of a row's results: the weight's column with which it begins, its numbers, and which of these the weight
    has (None: all)."""

    column: Value
    value: Value
    mask: Value | None


def pair_sums(product: ManyRows, done: Done) -> list[Found]:
    """Return a row's sums of one pair of panels, scaled and with their bias."""
    weights = [done.given[each.name] for each in weight_names(product)]
    start = done.pair * (PANEL if product.panel_distance else PANEL_PAIR)
    found = []
    for at in range(0, PANEL_PAIR, product.lanes):
        offset = at if not product.panel_distance or at < PANEL else at - PANEL + product.panel_distance * PANEL
        column = start + offset
        mask = columns_there(product, column, PANEL_PAIR)
        sums = done.sums.load(product.lanes, done.kept, at)
        value = finished(product, weights, sums, column, done.given["x"], done.row)
        found.append(Found(column, value, mask))
    return found


def store_sums(product: ManyRows, done: Done) -> None:
    """`Finish`: out[row, columns] = the sums, rounded to the type of `out`; of a list less the skipped columns."""
    for column, value, mask in pair_sums(product, done):
        place = column - done.given["skipped_columns"] if product.listed else column + product.first_column
        done.given["out"].store(value, done.row, place, mask=mask)


def add_sums(product: ManyRows, done: Done) -> None:
    """`Finish`: out[row, columns] += the sums; `out` is float32."""
    out = done.given["out"]
    for column, value, mask in pair_sums(product, done):
        out.store(out.load(product.lanes, done.row, column, mask=mask) + value, done.row, column, mask=mask)
