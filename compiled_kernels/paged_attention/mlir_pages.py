"""Describe the keys and values that a query reads: kinds of pages, and runs of positions in them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from compiled_kernels.builder.functions import loop
from compiled_kernels.builder.target import Named, largest_divisor
from compiled_kernels.builder.values import Value, constant, index
from compiled_kernels.builder.vectors import broadcast_pair, total, totals
from compiled_kernels.paged_attention.mlir_softmax import Query, first_seen
from compiled_kernels.paged_attention.mlir_tile import PageKind, multiply_add, products


class ReadDensePages(PageKind):
    """Pages of keys and values that are not quantized: pools `k` and `v` [page, group, offset, dim]."""

    kind = "dense"

    @property
    def memories(self) -> list[Named]:
        return [Named("k", self.shape.pages), Named("v", self.shape.pages)]

    def pack(self, key: Value) -> None:
        shape, given, offset = self.shape, self.given, self.given["offset"]
        each, lanes, at = shape.values_per_element, shape.columns, given["at"]
        read = largest_divisor(shape.head_dim, 32 if shape.uses_bf16_pairs else shape.lanes)
        for column in range(0, shape.head_dim, read):
            elements = self._factors(self._read("k", offset, column, read))
            elements = elements.bits("i32") if shape.uses_bf16_pairs else elements
            for i in range(read // each):
                given["keys"][at, column // each + i, key] = elements.at(i)
        row, values = key // each, given["values"]
        for column in range(0, shape.head_dim, lanes):
            loaded = self._read("v", offset, column, lanes)
            if shape.uses_bf16_pairs:  # into one half of each element: the keys of a pair come one by one
                shift = (key % each * 16).to("i32").broadcast(lanes)
                bits = loaded.bits("i16").to("i32", signed=False) << shift
                loaded = values.load(lanes, at, row, column) | bits
            values.store(loaded, at, row, column)

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
            with loop(begin // 16 * 16, end, 16) as run:  # may reach beyond the used offsets; those scores are ignored
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
        """Prefetch the next page's contents at `offset`, one cache line at a time: pages are not contiguous, so the
        processor would have no load in progress between two pages."""
        for at in range(0, self.shape.head_dim, 16 if self.shape.dtype == "f32" else 32):
            self.given[memory].prefetch(self.given["next"], self.given["group"], offset, at)

    @property
    def weight_memories(self) -> tuple[str, ...]:
        return ("scores", "weights") if self.shape.uses_bf16_pairs else ("scores",)

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
        """Return the values of two keys as pairs, 16 columns in a vector; two such vectors come from one load of each
        key.
        """
        keys, values = (offset, offset + 1), []
        for key in keys:
            self._prefetch("v", key)
        for column in columns[::2]:
            first, second = (self._read("v", key, column, 32) for key in keys)
            for half in (0, 16):
                values.append(first.shuffle(second, [at + side for at in range(half, half + 16) for side in (0, 32)]))
        return values


class PositionRun(NamedTuple):
    """The positions from `first` to `last`, which a query reads from pages of one kind. If contexts are split into
    chunks, either each chunk reads its part of the positions, or the first or last chunk reads all of them."""

    pages: PageKind
    chunk: Literal["each", "first", "last"]
    first: Value
    last: Value


@dataclass(frozen=True)
class Context:
    """The positions that a query reads: those of its window and the sinks, all from dense pages."""

    shape: Any

    @property
    def kinds(self) -> tuple[PageKind, ...]:
        """Return the kinds of pages, each with its own page table."""
        return (ReadDensePages(self.shape),)

    @property
    def memories(self) -> list[Named]:
        """Return the arguments for all pages, then for their tables, which are stored row after row."""
        tables = [Named(f"{kind.kind}_table", self.shape.flat_type) for kind in self.kinds]
        return [*(each for kind in self.kinds for each in kind.memories), *tables]

    def runs(self, length: Value) -> list[PositionRun]:
        """Return the runs of positions that the query at the end of `length` positions reads. The ends of runs never
        decrease as the length grows."""
        seen, sinks = first_seen(self.shape, length), self.shape.num_sink_tokens
        front = [PositionRun(self.kinds[0], "first", index(0), seen.minimum(sinks))] if sinks else []
        return front + self._runs_between(seen, length)

    def _runs_between(self, seen: Value, length: Value) -> list[PositionRun]:
        (dense,) = self.kinds
        return [PositionRun(dense, "each", seen, length)]

    def read(self, pages: PageKind, lengths: tuple[Value, Value], position: Value, count: int = 1) -> Value:
        """Return whether any query reads, from these pages, one of `count` positions from `position` (a number or a
        vector) on. The queries are at the ends of contexts whose lengths lie between the two `lengths`, smallest and
        largest."""
        found = []
        for least, most in zip(*(self.runs(each) for each in lengths), strict=True):
            if least.pages.kind == pages.kind:
                lanes = position.lanes
                first, last = (each.broadcast(lanes) if lanes else each for each in (least.first, most.last))
                found.append((position + (count - 1)).compared("uge", first) & position.below(last))
        return functools.reduce(Value.__or__, found)
