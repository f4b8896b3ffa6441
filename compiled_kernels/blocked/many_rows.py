"""Define the product of many rows with a weight in panels, and the functions that store its sums (see many.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from compiled_kernels.blocked.few import columns_there, finished, weight_names
from compiled_kernels.blocked.layout import PANEL, PANEL_PAIR
from compiled_kernels.blocked.shape import VALUES_PER_WORD, Panels, rows_type
from compiled_kernels.builder.target import SIZE_BOUND, Named, indices, memref
from compiled_kernels.builder.values import Value

MAX_RUN_ROWS = 384  # a multiple of TILE_ROWS: sums of that many rows times a pair of panels are 96 KiB
ORDER_TYPE = memref((SIZE_BOUND,), "i64")


@dataclass(frozen=True)
class ManyRows(Panels):
    """The product of any number of rows, at least `TILE_ROWS`, with a weight in panels. `out` has type `out_dtype`
    (f32, bf16) and `columns` columns (0: those of the weight). `panel_distance`: number of panels from the first panel
    of a pair to the second; 0: they are adjacent. `listed`: a list gives the row numbers of x and out, and only some
    pairs of panels are multiplied (see `listed_arguments`). `first_column`: the column of out for the weight's first
    column.
    """

    out_dtype: str = "f32"
    columns: int = 0
    panel_distance: int = 0
    listed: bool = False
    first_column: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.panel_distance and self.out_features % PANEL_PAIR:
            raise ValueError(f"{self.name}: panels that stand apart need whole pairs, not {self.out_features} columns")

    @property
    def multiplied_dtype(self) -> str:
        """Return the type of x in the multiplication: bfloat16 if the processor sums products of bfloat16 pairs,
        float32 otherwise. With `w8a8` it is the type that x is quantized from, x's own for every number of rows.
        """
        if self.w8a8:
            return self.x_dtype
        return "bf16" if self.uses_bf16_pairs else "f32"

    @property
    def multiplied(self) -> int:
        """Return the number of weight values in a word of the form that tiles multiply."""
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
        """Return whether tiles multiply the weight in its stored form. A tile of only some columns of a pair passes
        over the block several times, but each cache line has words of all columns: a scratch block is then faster.
        """
        if self.group:
            return False
        stored = self.multiplied == 4 if self.w8a8 else self.weight_dtype == self.multiplied_dtype
        return stored and self.vectors_per_tile * self.lanes == PANEL_PAIR

    @property
    def read(self) -> list[Named]:
        """Return the weight arguments of a tile's function: the stored weight, or a scratch block with its scales and
        minima; with minima also the sums of x over each group.
        """
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
        """Return the argument with the list of rows of x and out, for a `listed` product."""
        return [Named("order", ORDER_TYPE)] * self.listed

    @property
    def panels_apart(self) -> tuple[int, int, int]:
        """Return three numbers: of pairs of panels, of panels from one pair to the next, and of panels from a pair's
        first panel to its second.
        """
        distance = self.panel_distance
        return (distance, 1, distance) if distance else (self.panels // 2, 2, 1)


# Arguments of a `listed` product: row i of x and out is %order[i]; pairs of panels from first_pair to pair_end are
# multiplied, and the weight's column %skipped_columns is the first in out.


def listed_arguments(order: str = ORDER_TYPE) -> list[Named]:
    """Return the arguments that only a `listed` product has; `order` is the memref type of its list."""
    return [Named("order", order), *indices("first_pair", "pair_end", "skipped_columns")]


class Done(NamedTuple):
    """The complete sums of one row for one pair of panels: `sums` and the row `kept` in it, the function's arguments by
    name, the row of x and out, and the number of the pair.
    """

    given: dict[str, Value]
    sums: Value
    row: Value
    kept: Value
    pair: Value


Finish = Callable[[ManyRows, Done], None]
"""Makes what becomes of a row's sums of one pair of panels."""


class Found(NamedTuple):
    """A vector of results of one row: the weight's column that it begins with, its numbers, and a mask of the columns
    that the weight has (None: all).
    """

    column: Value
    value: Value
    mask: Value | None


def pair_sums(product: ManyRows, done: Done) -> list[Found]:
    """Return the results of one row for one pair of panels: its sums, scaled and with their bias."""
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
    """Store a row's sums as out[row, columns], rounded to the type of `out` (a `Finish`). A product with a list leaves
    out the skipped columns.
    """
    for column, value, mask in pair_sums(product, done):
        place = column - done.given["skipped_columns"] if product.listed else column + product.first_column
        done.given["out"].store(value, done.row, place, mask=mask)


def add_sums(product: ManyRows, done: Done) -> None:
    """Add a row's sums to out[row, columns], which is float32 (a `Finish`)."""
    out = done.given["out"]
    for column, value, mask in pair_sums(product, done):
        out.store(out.load(product.lanes, done.row, column, mask=mask) + value, done.row, column, mask=mask)
