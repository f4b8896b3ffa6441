"""Quantize rows of activations to INT8, define their memory layout, and multiply them with weights.

A row has words of 32 bits, then a tail: the bits of each block's scale, the sum of each group's values, and padding.
The content of a word depends on the multiply instruction; int32 sums never saturate:

| values per word | instruction | weight codes | level |
|---|---|---|---|
| 4 of INT8 | VPDPBUSD, with 4 bytes of the weight | all | v4+vnni and above |
| 4 of INT8 | VPMADDUBSW; int16 sums are widened before they overflow | of up to 6 bits | v3, v4 |
| 2 of INT16 | VPMADDWD | of 8 bits | v3, v4 |

Weight bytes are unsigned: the offset added to the codes, times the sum of a group's values, is subtracted.

The bytes of a weight's word (see blocked/layout.py) are columns 0, 2, 1, 3 of four: without byte dot products, its even
and odd bytes are two pairs of adjacent columns; with them, a row's words have the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compiled_kernels.blocked.layout import BYTE_OF_COLUMN
from compiled_kernels.builder.functions import function, loop
from compiled_kernels.builder.target import Named, Target, indices, largest_divisor, memref
from compiled_kernels.builder.values import Value, constant, rounded
from compiled_kernels.builder.vectors import dot_bytes, dot_bytes_in_pairs, dot_words

LINE = 16  # words per cache line
SMALLEST = 1.1754943508222875e-38  # the smallest normal float32: quantize_rows' least scale


@dataclass(frozen=True)
class Int8Rows:
    """The memory layout of rows of `width` numbers of type `x` (f32 or bf16) in INT8, for products with weights in
    panels. Each `block` of columns shares a scale (the last block may be shorter). Values are summed over each `group`
    of columns, which divides a block. A word has `values` values. `bits` is the size of the weight's codes; the layout
    does not depend on it.
    """

    width: int
    x: str
    target: Target
    block: int
    group: int
    values: int
    bits: int = field(compare=False)

    @property
    def lanes(self) -> int:
        """Return the number of words in a vector."""
        return self.target.lanes

    @property
    def words(self) -> int:
        return self.width // self.values

    @property
    def first_sum(self) -> int:
        """Return the index in a row of the word with the first group's sum; the sums follow the scales."""
        return self.words + -(-self.width // self.block)

    @property
    def row(self) -> int:
        """Return the number of words of a row, including its tail, which is padded to whole cache lines."""
        end = self.first_sum + self.width // self.group
        return self.words + -(-(end - self.words) // LINE) * LINE

    def type(self, rows: int) -> str:
        return memref((rows, self.row), "i32")

    def named(self, rows: int) -> Named:
        """Return a buffer for `rows` rows of this layout, named after the layout."""
        return Named("_".join(map(str, ("int8", self.width, self.values, self.block, self.group))), self.type(rows))


def quantize(name: str, rows: Int8Rows, count: int) -> None:
    """Build the function @name(x [count, width], out [count, words and tail], from, to), which quantizes the rows from
    `from` to `to` to INT8. It passes over a block twice, in the nearest cache. The maximum is computed on the bits
    without sign, so that NaN is the largest.
    """
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
    """Pack a vector of int32 within INT8's range into a row's words."""
    if rows.values == 2:
        return value.to("i16").bits("i32")
    narrow = value.to("i8")
    return narrow.shuffle(narrow, [i // 4 * 4 + BYTE_OF_COLUMN[i % 4] for i in range(value.lanes)]).bits("i32")


def integer_sums(
    rows: Int8Rows, parts: Sequence[Sequence[Value]], x: Value, places: Sequence[Value], at: Value,
    sums: Sequence[Value],
) -> list[Value]:  # fmt: skip
    """Return `sums` plus the products of rows of x with `parts` of a weight (see numbers.py). Sums are in the order:
    row 0 with each vector of columns, row 1, ... The rows of x are at `places`, and their words begin at `at`.
    """
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
    """Return for how many parts an int16 can hold the sum of products."""
    largest = 2 * ((1 << rows.bits) - 1) * 127
    return max(1, ((1 << 15) - 1) // largest)


def scale_at(rows: Int8Rows, x: Value, row: Value, column: Value) -> Value:
    """Return the scale of the block that contains `column`, in one row of x."""
    return x[row, column // rows.block + rows.words].bits("f32")


def sum_at(rows: Int8Rows, x: Value, row: Value, column: Value) -> Value:
    """Return the sum of one row's values over the group of columns that begins at `column`."""
    return x[row, column // rows.group + rows.first_sum]
