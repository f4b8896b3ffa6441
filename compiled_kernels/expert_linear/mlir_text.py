"""Products of rows with one expert's weight each as MLIR: rows are grouped by expert, and of an expert that no row
names nothing is read.

    sort: rows in the order of their experts (a counting sort by one thread; the others wait)
    for each expert that has rows: this thread's columns of its weight
      up to 6 rows    @{name}_few   each panel is read once, at memory's pace (see blocked/few.py)
      more            @{name}_many  blocks of the weight in cache, tiles of 6 rows (see blocked/many.py)

All experts' weights are one weight whose columns follow one another, so an expert is a run of its panels. A row's sums
are in the same order in both, and depend on no other row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from compiled_kernels.blocked.few import FewRows, Operands, group_sum, panel_rows, weight_names
from compiled_kernels.blocked.layout import PANEL, PANEL_PAIR
from compiled_kernels.blocked.many import ORDER_TYPE, ManyRows, listed_arguments, many, store_sums
from compiled_kernels.blocked.shape import TILE_ROWS, rows_type
from compiled_kernels.builder.functions import Given, alloca, call, function, loop, text_of, when
from compiled_kernels.builder.target import SIZE_BOUND, Named, Target, indices, memref
from compiled_kernels.builder.threads import entry, share, wait
from compiled_kernels.builder.values import Value, constant, index

LAST_TILES = (1, 2, 4, TILE_ROWS)  # rows of an expert's last tile, each with code of its own


@dataclass(frozen=True)
class ListedRows(FewRows):
    """A product of rows that a list names (see `listed_arguments`), with some panels of a stack of weights. `columns`
    are those of one weight; row i of out is made of row i // `reads` of x. `rows` are those of out."""

    reads: int = 1

    @property
    def x_type(self) -> str:
        return rows_type(self.in_features, self.x_dtype, self.rows // self.reads)

    @property
    def out_type(self) -> str:
        return rows_type(self.columns, self.out_dtype, self.rows)

    @property
    def order_type(self) -> str:
        return memref((self.rows,), "i64")

    @property
    def x_sums_type(self) -> str:
        """Return the memref type of the sums of x of each group of an expert's rows, where there are minima."""
        rows = TILE_ROWS if self.rows == SIZE_BOUND else self.rows
        return memref((rows, self.in_features // self.group), "f32")

    @property
    def arguments(self) -> list[Named]:
        """Return the arguments of the product's function; the last say which rows of the list are an expert's. Of any
        number of rows there are `TILE_ROWS` at most."""
        listed = listed_arguments(self.order_type)
        return [
            Named("x", self.x_type),
            *weight_names(self),
            Named("out", self.out_type),
            *listed,
            *indices("begin", "end"),
        ]


@dataclass(frozen=True)
class ExpertProduct:
    """x [row, width] of type `x_dtype` times one of `experts` weights [out, width] in panels, of `weight_dtype`,
    `quant_group`, `scales` and `minima` as `Panels` has them, into `out` of `out_dtype`; x comes as
    `many.multiplied_dtype`."""

    name: str
    experts: int
    in_features: int
    out_features: int
    weight_dtype: str
    x_dtype: str
    target: Target
    out_dtype: str = "f32"
    quant_group: int = 0
    scales: str = "f16"
    minima: str = ""

    @property
    def many(self) -> ManyRows:
        return ManyRows(f"{self.name}_many", *self._stack, **self._sizes, listed=True)

    @property
    def few(self) -> ListedRows:
        width, out, weight, _, target = self._stack
        entering = self.many.multiplied_dtype
        return ListedRows(f"{self.name}_few", width, out, weight, entering, target, rows=SIZE_BOUND, **self._sizes)

    @property
    def arguments(self) -> list[Named]:
        """Return the arguments of the kernel: x, the weights, out, each row's expert, room for the order of
        the rows and for where each expert's rows end, and the number of rows."""
        return [
            Named("x", self.many.x_type),
            *weight_names(self.many),
            Named("out", self.many.out_type),
            Named("expert", ORDER_TYPE),
            Named("order", ORDER_TYPE),
            Named("ends", self.ends_type),
            Named("sizes", memref((1,), "i64")),
        ]

    @property
    def ends_type(self) -> str:
        return memref((self.experts,), "i64")

    @property
    def _stack(self) -> tuple[int, int, str, str, Target]:
        return self.in_features, self.experts * self.out_features, self.weight_dtype, self.x_dtype, self.target

    @property
    def _sizes(self) -> dict[str, Any]:
        beside = {"quant_group": self.quant_group, "scales": self.scales, "minima": self.minima}
        return {"columns": self.out_features, "out_dtype": self.out_dtype, **beside}


def expert_text(product: ExpertProduct) -> str:
    """Return @{name}(see `arguments`): every thread takes a share of each expert's columns."""
    return text_of(lambda: _experts(product))


def _experts(product: ExpertProduct) -> None:
    few(product.few)
    many(product.many, store_sums)
    with entry(product.name, product.arguments) as given:
        pairs = product.out_features // PANEL_PAIR
        given["rows"], own = given["sizes"][0].to("index"), share(given, pairs, 1)
        with when(given["thread"].equals(0)):
            sort_rows(given, given["rows"], product.experts)
        wait()
        with each_named_expert(product.experts, given["ends"]) as (expert, begin, end):
            first, last = (expert * pairs + pair for pair in own)
            places = {"first_pair": first, "pair_end": last, "skipped_columns": expert * product.out_features}
            passed = given | places | {"begin": begin, "end": end}
            names = [name for name, _ in product.few.arguments]
            with when((end - begin).below(TILE_ROWS + 1)) as otherwise:
                call(product.few.name, [passed[name] for name in names])
            with otherwise():
                call(product.many.name, [passed[name] for name in (*names, "rows")])


@contextmanager
def each_named_expert(experts: int, ends: Value) -> Iterator[tuple[Value, Value, Value]]:
    """Make a loop over the experts that rows name; gives an expert, and where its rows begin and end in the list."""
    with loop(0, experts, 1, [index(0)]) as turn:
        begin, end = turn.carried[0], ends[turn.index].to("index")
        with when(begin.below(end)):
            yield turn.index, begin, end
        turn.carry([end])


def sort_rows(given: Given, rows: Value | int, experts: int) -> None:
    """Make `order` the rows in the order of their experts (`expert`), stable, and `ends` [expert] where each expert's
    rows end in it."""
    expert, order, ends = (given[name] for name in ("expert", "order", "ends"))
    with loop(0, experts) as turn:
        ends[turn.index] = constant(0, "i64")
    with loop(0, rows) as turn:
        number = expert[turn.index].to("index")
        ends[number] = ends[number] + 1
    with loop(0, experts, 1, [constant(0, "i64")]) as turn:
        begin, count = turn.carried[0], ends[turn.index]
        ends[turn.index] = begin
        turn.carry([begin + count])
    with loop(0, rows) as turn:
        number = expert[turn.index].to("index")
        place = ends[number]
        order[place.to("index")] = turn.index.to("i64")
        ends[number] = place + 1


def few(product: ListedRows) -> None:
    """Make @name(see `arguments`): rows `begin` to `end` of the list, panel by panel: tiles of `TILE_ROWS`, then one of
    what is left, where the last row may be computed more than once."""
    with function(product.name, product.arguments, inline=False) as given:
        begin, end = given["begin"], given["end"]
        left = (end - begin) % TILE_ROWS
        whole, last = end - left, end - 1
        first, column_end = (given[name] * PANEL_PAIR for name in ("first_pair", "pair_end"))
        sums = _x_sums(product, given) if product.has_minima else None
        operands = Operands(given["x"], [given[each.name] for each in weight_names(product)], given["out"], sums)

        def tile(column: Value, places: list[Value]) -> None:
            """Make the rows at these places of the list times a panel."""
            rows = [given["order"][place].to("index") for place in places]
            own = operands._replace(sum_rows=[place - begin for place in places])
            panel_rows(product, own, column, _read(product, rows), rows, column - given["skipped_columns"])

        with loop(first, column_end, PANEL) as panel:
            with loop(begin, whole, TILE_ROWS) as turn:
                tile(panel.index, [turn.index + i for i in range(TILE_ROWS)])
            fewer = 0
            for size in LAST_TILES:
                with when(index(fewer).below(left) & left.below(size + 1)):
                    tile(panel.index, [(whole + i).minimum(last) for i in range(size)])
                fewer = size


def _read(product: ListedRows, rows: list[Value]) -> list[Value]:
    """Return the rows of x that these rows of out are made of."""
    return rows if product.reads == 1 else [row // product.reads for row in rows]


def _x_sums(product: ListedRows, given: Given) -> Value:
    """Return the sums of x of each group of the rows from `begin` to `end` of the list."""
    found, begin = alloca(product.x_sums_type), given["begin"]
    with loop(begin, given["end"]) as place, loop(0, product.in_features // product.group) as group:
        (row,) = _read(product, [given["order"][place.index].to("index")])
        sums = group_sum(product, given["x"], row, group.index * product.group)
        found[place.index - begin, group.index] = sums
    return found
