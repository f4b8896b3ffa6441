"""Rows of activations in INT8: how they lie in memory, how they are made, and how they are multiplied.

A row is words of 32 bits, then a tail: the bits of each block's scale, then the sum of each group's values, then
padding. What a word holds depends on the instruction that multiplies it; int32 sums never saturate:

| values a word | multiplied by | of codes | at |
|---|---|---|---|
| 4 of INT8 | VPDPBUSD, with 4 bytes of the weight | all | v4+vnni and above |
| 4 of INT8 | VPMADDUBSW, whose sums of int16 are widened in time | of up to 6 bits | v3, v4 |
| 2 of INT16 | VPMADDWD | of 8 bits | v3, v4 |

Bytes of the weight have no sign: what was added to its codes for that, times the sum of a group's values, is taken off.

A weight's word (see blocked/layout.py) has columns 0, 2, 1, 3 of four as bytes: without byte dots its even and its odd
bytes are two pairs of neighbours; with them a row's words are in that order too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compiled_kernels.blocked.layout import BYTE_OF_COLUMN
from compiled_kernels.builder.functions import function, loop
from compiled_kernels.builder.target import Named, Target, indices, largest_divisor, memref
from compiled_kernels.builder.values import Value, constant, rounded
from compiled_kernels.builder.vectors import dot_bytes, dot_bytes_in_pairs, dot_words

LINE = 16  # words of a line of cache
SMALLEST = 1.1754943508222875e-38  # the smallest normal float32: quantize_rows' least scale


@dataclass(frozen=True)
class Int8Rows:
    """Rows of `width` numbers of type `x` (f32 or bf16) in INT8, for weights in panels: `block` columns share a scale,
    of the last block fewer may be left, and the values of `group` columns, which divide a block, are summed. A word
    holds so many `values`. `bits`: of a code of the weight; rows are the same for any."""

    width: int
    x: str
    target: Target
    block: int
    group: int
    values: int
    bits: int = field(compare=False)

    @property
    def lanes(self) -> int:
        """Return the words of a whole vector."""
        return self.target.lanes

    @property
    def words(self) -> int:
        return self.width // self.values

    @property
    def first_sum(self) -> int:
        """Return the word of the first group's sum: the scales are before it."""
        return self.words + -(-self.width // self.block)

    @property
    def row(self) -> int:
        """Return the words of a row with its tail: rows of whole cache lines stay such."""
        end = self.first_sum + self.width // self.group
        return self.words + -(-(end - self.words) // LINE) * LINE

    def type(self, rows: int) -> str:
        return memref((rows, self.row), "i32")

    def named(self, rows: int) -> Named:
        """Return a buffer for `rows` such rows, named after what it holds."""
        return Named("_".join(map(str, ("int8", self.width, self.values, self.block, self.group))), self.type(rows))


def quantize(name: str, rows: Int8Rows, count: int) -> None:
    """Make @name(x [count, width], out [count, words and tail], from, to): the rows from..to in INT8. (Two passes over
    a block that lies in the nearest cache; the largest is found among the bits of the numbers without their signs, so
    that a NaN is larger than all.)"""
    lanes, out = largest_divisor(rows.group, rows.lanes), Named("out", rows.type(count))
    arguments = [Named("x", memref((count, rows.width), rows.x)), out, *indices("from", "to")]
    with function(name, arguments, inline=False) as given, loop(given["from"], given["to"]) as turn:
        x, out, row, nothing = given["x"], given["out"], turn.index, [constant(0, "i32", lanes)]
        with loop(0, rows.width, rows.block) as block:
            end = (
                (block.index + rows.block).minimum(rows.width) if rows.width % rows.block else block.index + rows.block
            )
            with loop(block.index, end, lanes, nothing) as turn:
                bits = x.load(lanes, row, turn.index).to("f32").bits("i32")
                turn.carry([(bits & 0x7FFFFFFF).maximum(turn.carried[0])])
            scale = (turn.results[0].reduce("maxui").bits("f32") / 127.0).maximum(SMALLEST)
            out[row, block.index // rows.block + rows.words] = scale.bits("i32")
            with loop(block.index, end, rows.group) as group:
                with loop(group.index, group.index + rows.group, lanes, nothing) as turn:
                    value = x.load(lanes, row, turn.index).to("f32")
                    whole = rounded(value / scale.broadcast(lanes)).to("i32")
                    out.store(_packed(rows, whole), row, turn.index // rows.values)
                    turn.carry([whole + turn.carried[0]])
                out[row, group.index // rows.group + rows.first_sum] = turn.results[0].reduce("add")


def _packed(rows: Int8Rows, value: Value) -> Value:
    """Return a vector of int32 that INT8 holds as a row's words."""
    if rows.values == 2:
        return value.to("i16").bits("i32")
    narrow = value.to("i8")
    return narrow.shuffle(narrow, [i // 4 * 4 + BYTE_OF_COLUMN[i % 4] for i in range(value.lanes)]).bits("i32")


def integer_sums(
    rows: Int8Rows, parts: Sequence[Sequence[Value]], x: Value, places: Sequence[Value], at: Value,
    sums: Sequence[Value],
) -> list[Value]:  # fmt: skip
    """Return `sums` (of row 0 for each vector of columns, of row 1, ...) moved on by the `parts` of these vectors (see
    numbers.py); each row's words are those from `at` on."""
    found, count = list(sums), len(parts[0])
    most = _parts_in_int16(rows)
    for first in range(0, count, most):
        halves: list[Value | None] = [None] * len(found)
        for part in range(first, min(first + most, count)):
            for row, place in enumerate(places):
                factor = x[place, at + part].broadcast(rows.lanes)
                for i, weight in enumerate(parts):
                    here = row * len(parts) + i
                    if rows.target.has_int8_dot:
                        found[here] = dot_bytes(found[here], weight[part], factor)
                    elif rows.values == 2:
                        found[here] = found[here] + dot_words(weight[part], factor)
                    else:
                        pairs, before = dot_bytes_in_pairs(weight[part], factor), halves[here]
                        halves[here] = pairs if before is None else before + pairs
        ones = constant(1, "i16", 2 * rows.lanes)
        found = [a if b is None else a + dot_words(b, ones) for a, b in zip(found, halves, strict=True)]
    return found


def _parts_in_int16(rows: Int8Rows) -> int:
    """Return how many parts' sums of pairs of products an int16 holds."""
    largest = 2 * ((1 << rows.bits) - 1) * 127
    return max(1, ((1 << 15) - 1) // largest)


def scale_at(rows: Int8Rows, x: Value, row: Value, column: Value) -> Value:
    """Return the scale of the block of a row of x that has this column."""
    return x[row, column // rows.block + rows.words].bits("f32")


def sum_at(rows: Int8Rows, x: Value, row: Value, column: Value) -> Value:
    """Return the sum of the values of the group of a row of x that begins with this column."""
    return x[row, column // rows.group + rows.first_sum]
