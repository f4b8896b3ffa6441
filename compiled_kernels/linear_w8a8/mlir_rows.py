"""Rows of activations in INT8: how they lie in memory, and how they are made.

A row is words of 32 bits, then a tail: the scale's bits, then what is added to every sum of the row, then padding. What
a word holds depends on the instruction that multiplies it, each with int32 sums that never saturate:

| values a word | multiplied by | at |
|---|---|---|
| 4 of INT8 | VPDPBUSD, with 4 bytes of the weight plus 128; 128 times the row's sum is taken off | v4+vnni and above |
| 2 of INT16 | VPMADDWD | v3, v4 |

A weight's word (see blocked/layout.py) has columns 0, 2, 1, 3 of four as bytes: without byte dots its even and its odd
bytes are two pairs of neighbours; with them a row's words are in that order too.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.blocked.layout import BYTE_OF_COLUMN
from compiled_kernels.builder.functions import function, loop
from compiled_kernels.builder.values import Value, constant, rounded
from compiled_kernels.mlir_text import Named, Target, indices, largest_divisor, memref

TAIL = 16  # words; so many that rows of whole cache lines stay such
SCALE, ADDED = 0, 1  # of the tail
SMALLEST = 1.1754943508222875e-38  # the smallest normal float32: quantize_rows' least scale


@dataclass(frozen=True)
class Int8Rows:
    """Rows of `width` numbers of type `x` (f32 or bf16) in INT8, for weights in panels."""

    width: int
    x: str
    target: Target

    @property
    def values(self) -> int:
        """Return the values of a row in a word."""
        return 4 if self.target.has_int8_dot else 2

    @property
    def lanes(self) -> int:
        """Return the words of a whole vector."""
        return self.target.lanes

    @property
    def words(self) -> int:
        return self.width // self.values

    def type(self, rows: int) -> str:
        return memref((rows, self.words + TAIL), "i32")

    def named(self, rows: int) -> Named:
        """Return a buffer for `rows` such rows, named after what it holds."""
        return Named(f"int8_{self.width}x{self.values}", self.type(rows))


def quantize(name: str, rows: Int8Rows, count: int) -> None:
    """Make @name(x [count, width], out [count, words and tail], from, to): the rows from..to in INT8. (Two passes over
    a row that lies in the nearest cache; the largest is found among the bits of the numbers without their signs, so
    that a NaN is larger than all.)"""
    lanes, out = largest_divisor(rows.width, rows.lanes), Named("out", rows.type(count))
    arguments = [Named("x", memref((count, rows.width), rows.x)), out, *indices("from", "to")]
    with function(name, arguments, inline=False) as given, loop(given["from"], given["to"]) as row:
        x, out, nothing = given["x"], given["out"], [constant(0, "i32", lanes)]
        with loop(0, rows.width, lanes, nothing) as turn:
            bits = x.load(lanes, row.index, turn.index).to("f32").bits("i32")
            turn.carry([(bits & 0x7FFFFFFF).most(turn.carried[0])])
        scale = (turn.results[0].reduce("maxui").bits("f32") / 127.0).most(SMALLEST)
        with loop(0, rows.width, lanes, nothing) as turn:
            value = x.load(lanes, row.index, turn.index).to("f32")
            whole = rounded(value / scale.spread(lanes)).to("i32")
            out.store(_packed(rows, whole), row.index, turn.index // rows.values)
            turn.carry([whole + turn.carried[0]])
        added = turn.results[0].reduce("add") * -128 if rows.values == 4 else constant(0, "i32")
        for offset, word in ((SCALE, scale.bits("i32")), (ADDED, added)):
            out[row.index, rows.words + offset] = word


def _packed(rows: Int8Rows, value: Value) -> Value:
    """Return a vector of int32 that INT8 holds as a row's words."""
    if rows.values == 2:
        return value.to("i16").bits("i32")
    narrow = value.to("i8")
    return narrow.shuffle(narrow, [i // 4 * 4 + BYTE_OF_COLUMN[i % 4] for i in range(value.lanes)]).bits("i32")
