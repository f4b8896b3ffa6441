"""Multiply each row by the weight of its expert: rows are sorted by expert, and the weights of experts without rows are
not read.

    sort: rows in the order of their experts (a counting sort by one thread; the others wait)
    for each expert that has rows: this thread's columns of its weight
      up to 6 rows    `few`    each panel is read once, at memory bandwidth (see blocked/few.py)
      more            `many`  blocks of the weight in cache, tiles of 6 rows (see blocked/many.py)

All experts' weights form one weight with consecutive output columns, so an expert is a run of its panels. `few` and
`many` both sum a row in the same order, independent of other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from compiled_kernels.blocked.few import FewRows, Operands, panel_rows, weight_names, x_sums
from compiled_kernels.blocked.layout import PANEL, PANEL_PAIR
from compiled_kernels.blocked.many import many
from compiled_kernels.blocked.many_rows import ORDER_TYPE, ManyRows, listed_arguments, store_sums
from compiled_kernels.blocked.shape import TILE_ROWS, rows_type
from compiled_kernels.builder.functions import Given, call, function, loop, when
from compiled_kernels.builder.target import SIZE_BOUND, Named, indices, memref
from compiled_kernels.builder.threads import entry, share, wait
from compiled_kernels.builder.values import Value, constant, index

LAST_TILES = (1, 2, 4, TILE_ROWS)  # rows of an expert's last tile; each number has separate code


@dataclass(frozen=True)
class ListedRows(FewRows):
    """A product of the rows in a list (see `listed_arguments`) with some panels of the experts' weights. `columns`: the
    output columns of one expert. `rows`: the number of rows of out. Row i of out is computed from row i // `reads` of
    x."""

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
    def arguments(self) -> list[Named]:
        """Return the arguments of the product's function. The last two are the begin and end of an expert's rows in the
        list: at most `TILE_ROWS` rows for a product with a fixed number of rows."""
        listed = listed_arguments(self.order_type)
        return [
            Named("x", self.x_type),
            *weight_names(self),
            Named("out", self.out_type),
            *listed,
            *indices("begin", "end"),
        ]


def multiply_by_experts(name: str, few_rows: ListedRows, many_rows: ManyRows, experts: int) -> None:
    """Build the function @name(x, the weights, out, each row's expert, buffers for the order of rows and for the ends
    of experts' rows, the number of rows). Every thread computes a share of each expert's columns."""
    few(few_rows)
    many(many_rows, store_sums)
    arguments = [
        Named("x", many_rows.x_type), *weight_names(many_rows), Named("out", many_rows.out_type),
        Named("expert", ORDER_TYPE), Named("order", ORDER_TYPE), Named("ends", memref((experts,), "i64")),
        Named("sizes", memref((1,), "i64")),
    ]  # fmt: skip
    with entry(name, arguments) as given:
        pairs = many_rows.columns // PANEL_PAIR
        given["rows"], own = given["sizes"][0].to("index"), share(given, pairs, 1)
        with when(given["thread"].equals(0)):
            sort_rows(given, given["rows"], experts)
        wait()
        with each_named_expert(experts, given["ends"]) as (expert, begin, end):
            first, last = (expert * pairs + pair for pair in own)
            places = {"first_pair": first, "pair_end": last, "skipped_columns": expert * many_rows.columns}
            passed = given | places | {"begin": begin, "end": end}
            names = [name for name, _ in few_rows.arguments]
            with when((end - begin).below(TILE_ROWS + 1)) as otherwise:
                call(few_rows.name, [passed[name] for name in names])
            with otherwise():
                call(many_rows.name, [passed[name] for name in (*names, "rows")])


@contextmanager
def each_named_expert(experts: int, ends: Value) -> Iterator[tuple[Value, Value, Value]]:
    """Build a loop over the experts that have rows; yield an expert, and the begin and end of its rows in the list."""
    with loop(0, experts, 1, [index(0)]) as turn:
        begin, end = turn.carried[0], ends[turn.index].to("index")
        with when(begin.below(end)):
            yield turn.index, begin, end
        turn.carry([end])


def sort_rows(given: Given, rows: Value | int, experts: int) -> None:
    """Emit a stable sort of the rows by expert: it writes the sorted row numbers to `order`, and the end of each
    expert's rows to `ends` [expert].
    """
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
    """Build the function @name(see `arguments`), which multiplies the rows from `begin` to `end` of the list panel by
    panel: in tiles of `TILE_ROWS`, and a smaller last tile that may compute its last row more than once."""
    with function(product.name, product.arguments, inline=False) as given:
        begin, end = given["begin"], given["end"]
        left = (end - begin) % TILE_ROWS
        whole, last = end - left, end - 1
        first, column_end = (given[name] * PANEL_PAIR for name in ("first_pair", "pair_end"))

        def row_at(place: Value) -> Value:
            return given["order"][place].to("index")

        kept, sums = TILE_ROWS if product.rows == SIZE_BOUND else product.rows, None
        if product.has_minima:
            sums = x_sums(product, given["x"], kept, begin, end, lambda place: _read(product, [row_at(place)])[0])
        operands = Operands(given["x"], [given[each.name] for each in weight_names(product)], given["out"], sums)

        def tile(column: Value, places: list[Value]) -> None:
            """Multiply the rows at these places of the list with a panel."""
            rows = [row_at(place) for place in places]
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
    """Return the rows of x that these rows of out are computed from."""
    return rows if product.reads == 1 else [row // product.reads for row in rows]
