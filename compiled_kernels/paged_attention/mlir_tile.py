"""One tile of attention: a few queries over the visible keys of one page, or of one block of positions.

scores of the keys  ->  weights (running softmax)  ->  sums * factor + weights * values
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from compiled_kernels.builder.functions import function, loop
from compiled_kernels.builder.target import Named, indices
from compiled_kernels.builder.values import Value, constant, counted, fma
from compiled_kernels.builder.vectors import broadcast_pair, dot_pairs, total, totals
from compiled_kernels.paged_attention.mlir_shape import HEADS_TOGETHER, DecodeAttention
from compiled_kernels.paged_attention.mlir_softmax import Keys, Query, weigh

Steps = Callable[[Value], Iterable[tuple[Sequence[Value], Sequence[Value]]]]  # at an index, vectors and their factors


@dataclass(frozen=True)
class ReadPages(ABC):
    """Keys and values as a tile of queries reads them; `given` are the values at hand in the function, by name."""

    shape: Any
    given: Mapping[str, Value] = field(default_factory=dict)

    @abstractmethod
    def keys(self, queries: Sequence[Query]) -> Iterator[list[Keys]]:
        """Score the keys for all queries, then give each query's vectors of them."""

    @abstractmethod
    def keep(self, query: Query, weights: Sequence[Value]) -> None:
        """Store the weights of the keys, which the values are multiplied with."""

    @abstractmethod
    def added(self, queries: Sequence[Query], columns: Sequence[int], sums: list[Value]) -> list[Value]:
        """Return sums, for each query a vector from each of the columns on, and the values times the weights."""

    def add_values(self, queries: Sequence[Query], factors: Sequence[Value]) -> None:
        """Make sums = sums * factor + weights * values: as many columns at once as there are registers for."""
        lanes = self.shape.columns
        columns = range(0, self.shape.head_dim, lanes)
        most = max(1, self.shape.target.accumulators // len(queries))
        for first in range(0, len(columns), most):
            run, sums = columns[first : first + most], []
            for query, factor in zip(queries, factors, strict=True):
                spread, (memory, place) = factor.broadcast(lanes), query.found
                sums += [memory.load(lanes, *place, column) * spread for column in run]
            found = iter(self.added(queries, run, sums))
            for query in queries:
                for column in run:
                    query.found[0].store(next(found), *query.found[1], column)


def attend(pages: ReadPages, queries: Sequence[Query]) -> None:
    """Move on what the queries have found by all keys of a page that they see."""
    factors = []
    for query, keys in zip(queries, pages.keys(queries), strict=True):
        weights, factor = weigh(pages.shape, query, keys)
        pages.keep(query, weights)
        factors.append(factor)
    pages.add_values(queries, factors)


def multiply_add(sums: Value, a: Value, b: Value) -> Value:
    """Return sums + a * b: of float32, or of pairs of bfloat16."""
    return dot_pairs(sums, a, b) if a.element == "bf16" else fma(a, b, sums)


def products(
    over: tuple[Value | int, Value | int, int], sums: Sequence[Value], steps: Steps,
    add: Callable[[Value, Value, Value], Value] = multiply_add,
) -> list[Value]:  # fmt: skip
    """Return sums and, of each index (begin, end, step), the products of each factor with each vector."""
    with loop(*over, sums) as turn:
        moved = turn.carried
        for vectors, factors in steps(turn.index):
            pairs = ((vector, factor) for factor in factors for vector in vectors)
            moved = [add(each, *pair) for each, pair in zip(moved, pairs, strict=True)]
        turn.carry(moved)
    return turn.results


class DecodePages(ReadPages):
    """Pages that the query heads of one key/value head read together, each a query at the end of its own context."""

    shape: DecodeAttention
    kind: ClassVar[str]  # in names of functions

    @property
    @abstractmethod
    def memories(self) -> list[Named]:
        """Return the memories that keys and values lie in."""

    @property
    def queries_type(self) -> str:
        """Return the type of the memory of queries."""
        return self.shape.types["queries"]

    def queries(self, q: Value) -> Value:
        """Return the queries of one key/value head as they are read."""
        return q

    @abstractmethod
    def score(self, queries: Sequence[Query]) -> None:
        """Make scores[slot, offset] = q · k, at least for offsets from `from` to `to`."""

    def bound(self, given: dict[str, Value]) -> Self:
        """Return these pages inside a tile's function."""
        return replace(self, given=given)

    def keys(self, queries: Sequence[Query]) -> Iterator[list[Keys]]:
        self.score(queries)
        lanes, given = self.shape.lanes, self.given
        begin, end, base = (given[name].broadcast(lanes) for name in ("from", "to", "base"))
        for query in queries:
            found = []
            for start in range(0, self.shape.padded_page_size, lanes):
                offsets = counted(lanes) + start
                visible = offsets.compared("uge", begin) & offsets.below(end)
                found.append(Keys(given["scores"].load(lanes, query.slot, start), base + offsets, visible))
            yield found

    def keep(self, query: Query, weights: Sequence[Value]) -> None:
        for number, weight in enumerate(weights):
            self.given["scores"].store(weight, query.slot, number * self.shape.lanes)


def work(shape: DecodeAttention, queries: str) -> list[Named]:
    """Return the arguments that an item's functions share: the queries of the group, where their sums go, and room for
    scores and weights."""
    memories = [Named(name, shape.types[name]) for name in ("partial", "scores", "weights")]
    return [Named("q", queries), *memories, *indices("row", "group", "chunk", "position")]


def tile_arguments(pages: DecodePages) -> list[Named]:
    page = indices("page", "next", "from", "to", "base")
    return [*work(pages.shape, pages.queries_type), *pages.memories, *page]


def tile(pages: DecodePages, name: str) -> None:
    """Make @{name}_{kind}_tile (see `tile_arguments`): offsets [from, to) of one page, whose first position is `base`,
    move on what `partial` holds of the row's chunk, for all query heads of the group; what lies in the page `next` is
    asked for."""
    shape = pages.shape
    with function(f"{name}_{pages.kind}_tile", tile_arguments(pages)) as given:
        bound, first_head = pages.bound(given), given["group"] * shape.queries_per_kv
        for first in range(0, shape.queries_per_kv, HEADS_TOGETHER):
            queries = []
            for number in range(first, min(first + HEADS_TOGETHER, shape.queries_per_kv)):
                head = first_head + number
                found = given["partial"], (given["row"], head, given["chunk"])
                queries.append(Query(given["position"], head, number - first, (number,), found))
            attend(bound, queries)


class ReadDensePages(DecodePages):
    """Keys and values as they were computed: pools [page, group, offset, dim] `k` and `v`."""

    kind = "dense"

    @property
    def memories(self) -> list[Named]:
        return [Named("k", self.shape.pages), Named("v", self.shape.pages)]

    def score(self, queries: Sequence[Query]) -> None:
        shape, pairs = self.shape, self.shape.uses_bf16_pairs
        width = 32 if pairs else shape.columns
        columns = range(0, shape.head_dim, width)
        numbers = [[self._factors(self.given["q"].load(width, *each.place, at)) for at in columns] for each in queries]
        begin, end, scores = self.given["from"], self.given["to"], self.given["scores"]
        zero = constant(0.0, "f32", 16 if pairs else width)

        def score(query: list[Value], key: Iterable[Value]) -> Value:
            found = zero
            for a, b in zip(query, key, strict=True):
                found = multiply_add(found, a, b)
            return found

        if pairs and shape.page_size % 16 == 0:  # sums across lanes of 16 keys are taken together
            with loop(begin // 16 * 16, end, 16) as run:  # may reach beyond the offsets in use: such scores are ignored
                keys = [run.index + i for i in range(16)]
                for key in keys:
                    self._prefetch("k", key)
                for query, parts in zip(queries, numbers, strict=True):
                    found = [score(parts, (self._read("k", key, at, 32) for at in columns)) for key in keys]
                    scores.store(totals(found), query.slot, run.index)
            return
        with loop(begin, end) as offset:
            self._prefetch("k", offset.index)
            key = [self._factors(self._read("k", offset.index, at, width)) for at in columns]
            for query, parts in zip(queries, numbers, strict=True):
                scores[query.slot, offset.index] = total(score(parts, key))

    def _factors(self, loaded: Value) -> Value:
        return loaded if self.shape.uses_bf16_pairs else loaded.to("f32")

    def _read(self, memory: str, offset: Value, column: int, lanes: int) -> Value:
        return self.given[memory].load(lanes, self.given["page"], self.given["group"], offset, column)

    def _prefetch(self, memory: str, offset: Value) -> None:
        """Ask for what the next page holds at `offset`, a cache line at a time: pages lie anywhere, and between two of
        them the processor would have nothing under way."""
        for at in range(0, self.shape.head_dim, 16 if self.shape.dtype == "f32" else 32):
            self.given[memory].prefetch(self.given["next"], self.given["group"], offset, at)

    def keep(self, query: Query, weights: Sequence[Value]) -> None:
        super().keep(query, weights)
        for number, weight in enumerate(weights if self.shape.uses_bf16_pairs else ()):
            self.given["weights"].store(weight.to("bf16"), query.slot, number * self.shape.lanes)

    def added(self, queries: Sequence[Query], columns: Sequence[int], sums: list[Value]) -> list[Value]:
        begin, end, lanes = self.given["from"], self.given["to"], self.shape.columns
        scores, weights = self.given["scores"], self.given["weights"]

        def pairs(offset: Value) -> Iterator[tuple[list[Value], list[Value]]]:
            yield self._woven(offset, columns), [broadcast_pair(weights.load(2, each.slot, offset)) for each in queries]

        def singles(offset: Value) -> Iterator[tuple[list[Value], list[Value]]]:
            self._prefetch("v", offset)
            values = [self._read("v", offset, at, lanes).to("f32") for at in columns]
            yield values, [scores[each.slot, offset].broadcast(lanes) for each in queries]

        if self.shape.uses_bf16_pairs and len(columns) % 2 == 0:
            last = end - (end - begin) % 2
            begin, sums = last, products((begin, last, 2), sums, pairs)
        return products((begin, end, 1), sums, singles)

    def _woven(self, offset: Value, columns: Sequence[int]) -> list[Value]:
        """Return the values of two keys as pairs, 16 columns a vector; two such come from one load of each key."""
        keys, values = (offset, offset + 1), []
        for key in keys:
            self._prefetch("v", key)
        for column in columns[::2]:
            first, second = (self._read("v", key, column, 32) for key in keys)
            for half in (0, 16):
                values.append(first.shuffle(second, [at + side for at in range(half, half + 16) for side in (0, 32)]))
        return values
