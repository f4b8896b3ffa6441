"""Emit the innermost step of every product with panels: a few rows of x times parts of a weight, in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compiled_kernels.blocked.int8_rows import Int8Rows, integer_sums
from compiled_kernels.blocked.numbers import half_floats
from compiled_kernels.builder.values import Value, fma
from compiled_kernels.builder.vectors import broadcast_pair, dot_pairs


class InputRows(NamedTuple):
    """Some rows of x: the memory, the row numbers, and the layout of INT8 rows."""

    memory: Value
    rows: Sequence[Value]
    int8: Int8Rows | None = None


def step_sums(parts: Sequence[Sequence[Value]], x: InputRows, column: Value, sums: Sequence[Value]) -> list[Value]:
    """Return `sums` plus the products of rows of x, from `column` on, with `parts` of a weight. Sums are in the order:
    row 0 with each vector of columns, row 1, ...
    """
    if x.int8:
        return integer_sums(x.int8, parts, x.memory, x.rows, column // x.int8.values, sums)
    sums, lanes, pairs = list(sums), sums[0].lanes, parts[0][0].element == "bf16"
    for row, place in enumerate(x.rows):
        for part, factor in enumerate(_factors(x.memory, place, column, len(parts[0]), lanes, pairs)):
            for i, weight in enumerate(parts):
                at = row * len(parts) + i
                multiply = dot_pairs if pairs else _multiply
                sums[at] = multiply(sums[at], weight[part], factor)
    return sums


def _multiply(sums: Value, a: Value, b: Value) -> Value:
    return fma(a, b, sums)


def _factors(x: Value, row: Value, column: Value, parts: int, lanes: int, pairs: bool) -> list[Value]:
    """Broadcast each part's factor to a vector: numbers of one row of x from `column` on."""
    if pairs:
        return [broadcast_pair(x.load(2, row, column + at)) for at in range(0, 2 * parts, 2)]
    if x.element == "f32" or parts % 2:
        return [x[row, column + at].to("f32").broadcast(lanes) for at in range(parts)]
    words = [x.load(2, row, column + at).bits("i32").at(0).broadcast(lanes) for at in range(0, parts, 2)]
    return [value for word in words for value in half_floats(word)]
