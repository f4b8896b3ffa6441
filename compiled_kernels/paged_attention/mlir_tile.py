"""Build one tile of attention: a few queries over the visible keys of one page, or of one block of positions.

scores of the keys  ->  weights (running softmax)  ->  sums * factor + weights * values
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, Self

from compiled_kernels.builder.functions import function, loop
from compiled_kernels.builder.target import Named, indices
from compiled_kernels.builder.values import Value, counted, fma
from compiled_kernels.builder.vectors import dot_pairs
from compiled_kernels.paged_attention.mlir_shape import HEADS_TOGETHER, DecodeAttention
from compiled_kernels.paged_attention.mlir_softmax import Keys, Query, weigh

Steps = Callable[[Value], Iterable[tuple[Sequence[Value], Sequence[Value]]]]  # at an index, vectors and their factors


@dataclass(frozen=True)
class ReadPages(ABC):
    """The keys and values that a tile of queries reads; `given` are the function's arguments by name."""

    shape: Any
    given: Mapping[str, Value] = field(default_factory=dict)

    @abstractmethod
    def keys(self, queries: Sequence[Query]) -> Iterator[list[Keys]]:
        """Compute the scores of the keys for all queries, then yield each query's vectors of keys."""

    @property
    def weight_memories(self) -> tuple[str, ...]:
        """Return the names of the memories with the weights that multiply the values."""
        return ("weights",)

    def added(self, queries: Sequence[Query], columns: Sequence[int], sums: list[Value]) -> list[Value]:
        """Return `sums` plus the weighted values. There is one sum, a vector, for each query and each of `columns`."""
        raise NotImplementedError

    def add_values(self, queries: Sequence[Query], factors: Sequence[Value]) -> None:
        """Emit sums = sums * factor + weights * values; columns are processed as many at once as fit into registers."""
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
    """Update the running states of queries with the keys of a page that they see."""
    factors = []
    for query, keys in zip(queries, pages.keys(queries), strict=True):
        weights, factor = weigh(pages.shape, query, keys)
        for memory, (number, weight) in product(pages.weight_memories, enumerate(weights)):
            pages.given[memory].store(weight, query.slot, number * pages.shape.lanes)
        factors.append(factor)
    pages.add_values(queries, factors)


def multiply_add(sums: Value, a: Value, b: Value) -> Value:
    """Return sums + a * b in float32; for bfloat16, the products of pairs are added."""
    return dot_pairs(sums, a, b) if a.element == "bf16" else fma(a, b, sums)


def products(
    over: tuple[Value | int, Value | int, int], sums: Sequence[Value], steps: Steps,
    add: Callable[[Value, Value, Value], Value] = multiply_add,
) -> list[Value]:  # fmt: skip
    """Return `sums` plus the products of each factor and each vector that `steps` yields, for each index of the range
    `over` (begin, end, step).
    """
    with loop(*over, sums) as turn:
        moved = turn.carried
        for vectors, factors in steps(turn.index):
            pairs = ((vector, factor) for factor in factors for vector in vectors)
            moved = [add(each, *pair) for each, pair in zip(moved, pairs, strict=True)]
        turn.carry(moved)
    return turn.results


class PageKind(ReadPages):
    """One kind of pages: how decodes read it, for all query heads of a key/value head together, and how a span repacks
    it."""

    kind: ClassVar[str]  # part of function names

    @property
    @abstractmethod
    def memories(self) -> list[Named]:
        """Return the arguments for the memories of keys and values."""

    @property
    def weight_memories(self) -> tuple[str, ...]:
        return ("scores",)

    @property
    def positions_together(self) -> int:
        """Return the number of positions that one `pack` repacks: if one of these positions was written, all were."""
        return 1

    @abstractmethod
    def pack(self, key: Value) -> None:
        """Repack keys and values from `offset` of `page` on into block `at`: into `keys` [at, dim, key] and `values`
        [at, key, dim], from index `key` of the block's positions on."""

    @abstractmethod
    def score(self, queries: Sequence[Query]) -> None:
        """Emit scores[slot, offset] = q · k for the offsets between `from` and `to`; other offsets may be computed
        too.
        """

    def bound(self, given: dict[str, Value]) -> Self:
        """Return these pages with the arguments `given` of a tile's function."""
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


def work(shape: DecodeAttention) -> list[Named]:
    """Return the arguments that all functions of an item have: the queries of the key/value head, their sums, and
    buffers for scores and weights."""
    memories = [Named(name, shape.types[name]) for name in ("partial", "scores", "weights")]
    return [Named("q", shape.types["queries"]), *memories, *indices("row", "group", "chunk", "position")]


def tile_arguments(pages: PageKind) -> list[Named]:
    page = indices("page", "next", "from", "to", "base")
    return [*work(pages.shape), *pages.memories, *page]


def tile(pages: PageKind, name: str) -> None:
    """Build the function @{name}_{kind}_tile (see `tile_arguments`): it updates the state in `partial` by the offsets
    [from, to) of one page, whose first position is `base`, for all query heads of a key/value head, and prefetches the
    page `next`."""
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
