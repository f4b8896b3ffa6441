"""Read the repacked blocks of a span's context (see mlir_spans.py) in attention, for a few queries at a time. A vector
holds as many keys, or columns of values, as it has elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compiled_kernels.builder.functions import function
from compiled_kernels.builder.target import Named, indices
from compiled_kernels.builder.values import Value, constant, counted
from compiled_kernels.builder.vectors import broadcast_pair
from compiled_kernels.paged_attention.mlir_pages import Context
from compiled_kernels.paged_attention.mlir_shape import BLOCK_POSITIONS, QUERIES_TOGETHER, SpanAttention
from compiled_kernels.paged_attention.mlir_softmax import Keys, Query
from compiled_kernels.paged_attention.mlir_tile import PageKind, ReadPages, attend, products


@dataclass(frozen=True, kw_only=True)
class Blocks(ReadPages):
    """The block with index `at` of the repacked `keys` and `values` from one kind of pages; its first position is
    `start`.
    """

    shape: SpanAttention
    context: Context
    pages: PageKind

    def keys(self, queries: Sequence[Query]) -> Iterator[list[Keys]]:
        shape, lanes, given = self.shape, self.shape.lanes, self.given
        starts, each = range(0, BLOCK_POSITIONS, lanes), shape.values_per_element
        most, zero = max(1, shape.target.accumulators // len(queries)), constant(0.0, "f32", lanes)
        scores: list[list[Value]] = [[] for _ in queries]
        for first in range(0, len(starts), most):
            run = starts[first : first + most]

            def steps(at: Value, run: Sequence[int] = run) -> Iterator[tuple[list[Value], list[Value]]]:
                factors = [self._factor(given["q"], lanes, *query.place, at * each) for query in queries]
                yield [self._elements("keys", lanes, at, start) for start in run], factors

            found = products((0, shape.head_dim // each, 1), [zero] * (len(queries) * len(run)), steps)
            for number, of_query in enumerate(scores):
                of_query += found[number * len(run) : (number + 1) * len(run)]
        for query, of_query in zip(queries, scores, strict=True):
            yield [self._keys(query, *pair) for pair in zip(of_query, starts, strict=True)]

    def _keys(self, query: Query, scores: Value, start: int) -> Keys:
        first, length = self.given["start"] + start, query.position + 1
        positions = first.broadcast(self.shape.lanes) + counted(self.shape.lanes)
        visible = self.context.read(self.pages, (length, length), positions)
        return Keys(scores, positions, visible & self._chosen(query, first) if self.shape.selected else visible)

    def _chosen(self, query: Query, first: Value) -> Value:
        """Return which positions from `first` on are in pages selected by the query."""
        shape, given = self.shape, self.given
        token = query.position - given["before"]
        line = (token * shape.num_kv_heads + given["group"]) * given["held"]

        def read(position: Value) -> Value:
            page = (position // shape.page_size).minimum(given["held"] - 1)  # no page beyond the context
            return given["chosen"][line + page].compared("ne", 0)

        if shape.page_size % shape.lanes == 0:  # they lie in one page
            return read(first).broadcast(shape.lanes)
        found = constant(0, "i1", shape.lanes)
        for at in range(shape.lanes):
            found = found.put(at, read(first + at))
        return found

    def added(self, queries: Sequence[Query], columns: Sequence[int], sums: list[Value]) -> list[Value]:
        lanes, each = self.shape.columns, self.shape.values_per_element

        def steps(at: Value) -> Iterator[tuple[list[Value], list[Value]]]:
            factors = [self._factor(self.given["weights"], lanes, query.slot, at * each) for query in queries]
            yield [self._elements("values", lanes, at, column) for column in columns], factors

        return products((0, BLOCK_POSITIONS // each, 1), sums, steps)

    def _elements(self, memory: str, lanes: int, row: Value, column: int) -> Value:
        loaded = self.given[memory].load(lanes, self.given["at"], row, column)
        return loaded.bits("bf16") if self.shape.uses_bf16_pairs else loaded

    def _factor(self, memory: Value, lanes: int, *place: Value | int) -> Value:
        """Return the number at a place, or the pair of bfloat16, in every element of a vector."""
        if self.shape.uses_bf16_pairs:
            return broadcast_pair(memory.load(2, *place))
        return memory[place].to("f32").broadcast(lanes)


def rows_arguments(shape: SpanAttention) -> list[Named]:
    memories = [Named(name, shape.types[name]) for name in ("q", "keys", "values", "weights", "found")]
    places = indices("at", "start", "group", "token", "slot", "queries", "before")
    chosen = [Named("chosen", shape.types["chosen"]), *indices("held")] * shape.selected
    return [*memories, *places, *chosen]


def rows(context: Context, pages: PageKind) -> None:
    """Build the function @{kind}_rows (see `rows_arguments`): it processes the next few queries of a tile, from `slot`
    on, over one block of the pages. The tile begins with `token` and has `queries` queries. `before` is the number of
    positions before the span. Slots beyond the tile's last query repeat that query."""
    shape, share = context.shape, context.shape.queries_per_kv
    with function(f"{pages.kind}_rows", rows_arguments(shape)) as given:
        queries = []
        for number in range(QUERIES_TOGETHER):
            slot = given["slot"] + number
            row = slot.minimum(given["queries"] - 1)
            token, head = given["token"] + row // share, given["group"] * share + row % share
            queries.append(Query(given["before"] + token, head, number, (token, head), (given["found"], (slot,))))
        attend(Blocks(shape=shape, given=given, context=context, pages=pages), queries)
