"""Read quantized pages in attention: weighted sums of codes give the scores (q over dim) and the results (weights over
offsets). Scales are multiplied into the weights, once for a run and not for each code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Self

from compiled_kernels.builder.functions import alloca, loop
from compiled_kernels.builder.target import Named, largest_divisor
from compiled_kernels.builder.values import Value, constant, fma, index, rounded
from compiled_kernels.builder.vectors import dot_bytes, total
from compiled_kernels.paged_attention.mlir_shape import BLOCK_POSITIONS
from compiled_kernels.paged_attention.mlir_softmax import Query
from compiled_kernels.paged_attention.mlir_tile import PageKind, products
from compiled_kernels.quantized_attention.mlir_shape import QuantizedOperand
from compiled_kernels.quantized_attention.quantize import QUANTIZED_NAMES

LARGEST = 32639  # 127 * 256 + 127: the largest fixed-point number with two halves that are signed bytes
# Bits of e4m3 numbers read as float32 are too small by 2**120: half of the factor is put into weights, the rest into
# sums, so that neither overflows or underflows.
HALF_WAY = 2.0**60
TINY = 1e-30  # smaller weights count as zero, because their reciprocal would overflow
ACCUMULATOR_SHARE = 3 / 4  # fraction of the registers that hold sums
EVERY_BYTE = 0x01010101

Weight = Callable[[Query, int], Value]  # a query's weights from a column on: a vector of float32, `folds` long
Take = Callable[[Query, Value, Value], None]  # takes a query, the place of a run's first number, and the run's sums
Stretch = tuple[Value, Value, int]  # place of numbers in a page, place in a block, and their count


class ReadQuantizedPages(PageKind):
    """Pages of keys and values stored as codes with scales and minima (see quantize.py). Every offset of a page is
    scored; offsets outside [from, to) get weight zero, whatever they contain."""

    kind = "quantized"

    @property
    def memories(self) -> list[Named]:
        kinds = [kind for side in self._sides.values() for kind in (side.codes, side.scales, side.scales)]
        return [Named(name, kind) for name, kind in zip(QUANTIZED_NAMES, kinds, strict=True)]

    @property
    def _sides(self) -> dict[str, QuantizedOperand]:
        return {"k": self.shape.key_operand, "v": self.shape.value_operand}

    def bound(self, given: dict[str, Value]) -> Self:
        return super().bound(given | {f"{name}_folded": alloca(side.folded) for name, side in self._sides.items()})

    @property
    def positions_together(self) -> int:
        return largest_divisor(self.shape.layout.rule.quant_group, BLOCK_POSITIONS)

    def pack(self, key: Value) -> None:
        zero = index(0)
        head, positions = (zero, zero, self.shape.head_dim), (self.given["offset"], key, self.positions_together)
        self._pack_numbers("k", "keys", head, positions)
        self._pack_numbers("v", "values", positions, head)

    def _pack_numbers(self, name: str, memory: str, summed: Stretch, kept: Stretch) -> None:
        """Pack the numbers that codes stand for: minimum + scale * code."""
        side, given, page = self._sides[name], self.given, (self.given["page"], self.given["group"])
        (row, to_row, height), (column, to_column, width) = summed, kept
        lanes, codes, each = side.lanes, side.codes_per_word, self.shape.values_per_element
        with loop(0, height, codes) as down, loop(0, width, lanes) as along:
            first, at, numbers = row + down.index, column + along.index, []
            word = given[f"{name}c"].load(lanes, *page, first // codes, at)
            for code in range(codes):
                place = *page, at // side.numbers_per_scale, first + code
                scale, minimum = (given[name + part][place].to("f32").broadcast(lanes) for part in "sm")
                unit, least = (HALF_WAY, scale.like(0.0)) if side.format == "fp8" else (1.0, minimum)
                numbers.append(fma(_number(side, word, code) * unit, scale * unit, least))
            for i in range(0, codes, each):
                element = numbers[i] if each == 1 else _pairs(*numbers[i : i + 2])
                given[memory].store(element, given["at"], (to_row + down.index + i) // each, to_column + along.index)

    def score(self, queries: Sequence[Query]) -> None:
        q, scores, folds = self.given["q"], self.given["scores"], self.shape.key_operand.folds
        self._weighted_sums(
            "k", queries, lambda query, at: q.load(folds, *query.place, at).to("f32"),
            lambda query, offset, found: scores.store(found, query.slot, offset),
        )  # fmt: skip

    def add_values(self, queries: Sequence[Query], factors: Sequence[Value]) -> None:
        side, scores, of_slot = self.shape.value_operand, self.given["scores"], list(factors)

        def join(query: Query, column: Value, found: Value) -> None:
            memory, place = query.found
            before = memory.load(side.lanes, *place, column)
            memory.store(fma(before, of_slot[query.slot].broadcast(side.lanes), found), *place, column)

        self._weighted_sums("v", queries, lambda query, at: scores.load(side.folds, query.slot, at), join)

    def _weighted_sums(self, name: str, queries: Sequence[Query], weight: Weight, take: Take) -> None:
        """Emit, for every query and every kept number, the sum of weight * (minimum + scale * code) over the summed
        axis. Codes, scales and minima are in {name}c, {name}s and {name}m, at `page` and `group`; `next` is the next
        page."""
        side = self._sides[name]
        each = len(queries) * (2 if side.uses_int8_dot else 1)
        most = max(1, int(ACCUMULATOR_SHARE * side.target.registers) // each)
        starts = range(0, side.numbers_per_scale, side.lanes)
        with loop(0, side.kept // side.numbers_per_scale) as part:
            folded = [self._fold_scales(name, part.index, query, weight) for query in queries]
            for first in range(0, len(starts), most):
                kept = [part.index * side.numbers_per_scale + start for start in starts[first : first + most]]
                sums = iter((self._fixed_sums if side.uses_int8_dot else self._exact_sums)(name, queries, kept))
                for query, (unit, bias) in zip(queries, folded, strict=True):
                    for place in kept:
                        take(query, place, fma(next(sums), unit.broadcast(side.lanes), bias.broadcast(side.lanes)))

    def _fetched(self, memory: str, lanes: int, *place: Value | int) -> Value:
        """Return the contents of a place of the page, and prefetch the same place of the next page: otherwise no load
        would be in progress between two pages."""
        group, values = self.given["group"], self.given[memory]
        values.prefetch(self.given["next"], group, *place)
        return values.load(lanes, self.given["page"], group, *place)

    def _fold_scales(self, name: str, part: Value, query: Query, weight: Weight) -> tuple[Value, Value]:
        """Emit folded[slot] = weights times the scales of a part of the page. Returns two numbers (unit, bias): sum of
        weight * number = unit * sum of folded * code + bias. Values of weight zero are left out, whatever their scale
        is.
        """
        side, (scales, minima), folded = self._sides[name], (f"{name}s", f"{name}m"), self.given[f"{name}_folded"]
        lanes, fp8, numbers = side.folds, side.format == "fp8", []
        zero = bias = constant(0.0, "f32", lanes)
        for column in range(0, side.summed, lanes):
            weights = weight(query, column)
            of_part = [self._fetched(each, lanes, part, column).to("f32") for each in (scales, *[minima] * (not fp8))]
            if name == "v":
                counts = weights.compared("une", 0.0)
                of_part = [counts.select(each, zero) for each in of_part]
            numbers.append((weights * HALF_WAY if fp8 else weights) * of_part[0])
            bias = bias if fp8 else fma(weights, of_part[1], bias)
        if side.uses_int8_dot:
            return _fixed(folded, query.slot, numbers), total(bias)
        for at, each in enumerate(numbers):
            folded.store(each, query.slot, at * lanes)
        return constant(HALF_WAY if fp8 else 1.0, "f32"), total(bias)

    def _words(self, name: str, kept: Sequence[Value], word: Value) -> list[Value]:
        return [self._fetched(f"{name}c", self._sides[name].lanes, word, at) for at in kept]

    def _fixed_sums(self, name: str, queries: Sequence[Query], kept: Sequence[Value]) -> list[Value]:
        """Return sums of products of four codes with the high and with the low bytes of four weights: 256 times the
        high sums plus the low sums."""
        side, folded = self._sides[name], self.given[f"{name}_folded"]

        def steps(word: Value) -> Iterable[tuple[list[Value], list[Value]]]:
            loaded, parts = self._words(name, kept, word), 8 // side.bits
            for part in range(parts):  # of a byte
                mask, quad = (2**side.bits - 1) * EVERY_BYTE, word * parts + part
                codes = loaded if parts == 1 else [(each >> (side.bits * part)) & mask for each in loaded]
                yield codes, [folded[query.slot, half, quad].broadcast(16) for query in queries for half in (0, 1)]

        zero, count = constant(0, "i32", 16), len(kept)
        sums = products((0, side.words, 1), [zero] * (2 * len(queries) * count), steps, dot_bytes)
        found = []
        for at in range(0, len(sums), 2 * count):
            halves = zip(sums[at : at + count], sums[at + count : at + 2 * count], strict=True)
            found += [fma(high.to("f32"), constant(256.0, "f32", 16), low.to("f32")) for high, low in halves]
        return found

    def _exact_sums(self, name: str, queries: Sequence[Query], kept: Sequence[Value]) -> list[Value]:
        """Return sums of one code at a time, as float32."""
        side, folded = self._sides[name], self.given[f"{name}_folded"]

        def steps(word: Value) -> Iterable[tuple[list[Value], list[Value]]]:
            loaded, first = self._words(name, kept, word), word * side.codes_per_word
            for code in range(side.codes_per_word):
                numbers = [_number(side, each, code) for each in loaded]
                yield numbers, [folded[query.slot, first + code].broadcast(side.lanes) for query in queries]

        zero = constant(0.0, "f32", side.lanes)
        return products((0, side.words, 1), [zero] * (len(queries) * len(kept)), steps)


def _fixed(memory: Value, slot: int, numbers: Sequence[Value]) -> Value:
    """Store numbers as fixed-point numbers of 16 bits, high and low bytes separately; return their unit, chosen so that
    the largest number becomes LARGEST."""
    lanes = numbers[0].lanes
    most = constant(0, "i32", lanes)
    for each in numbers:  # for floats without sign, the order of bits is the order of values
        most = most.maximum(each.bits("i32") & 0x7FFFFFFF)
    largest = most.reduce("maxui").bits("f32")
    inverse = largest.compared("olt", TINY).select(largest.like(0.0), largest.like(LARGEST) / largest)
    for at, each in enumerate(numbers):
        integer = rounded(each * inverse.broadcast(lanes)).to("i32")
        high = (integer + 128).signed_shift(8)
        for half, part in enumerate((high, integer - (high << 8))):
            memory.store(part.to("i8").bits("i32"), slot, half, at * lanes // 4)
    return largest * (1 / LARGEST)


def _pairs(*halves: Value) -> Value:
    """Return two vectors of numbers as one of pairs of bfloat16, each in 32 bits."""
    low, high = (each.to("bf16").bits("i16").to("i32", signed=False) for each in halves)
    return low | high << 16


def _number(side: QuantizedOperand, word: Value, code: int) -> Value:
    """Return the code of that number in every word as float32. For e4m3 it is too small by 2**120: sign, exponent and
    fraction are moved to their places in float32."""
    if side.format != "fp8":
        return ((word >> (8 * (code % 4) + side.bits * (code // 4))) & (2**side.bits - 1)).to("f32")

    def moved(bits: int, by: int) -> Value:
        return (word << by if by >= 0 else word >> -by) & bits

    return (moved(-(2**31), 24 - 8 * code) | moved(0x7F << 20, 20 - 8 * code)).bits("f32")
