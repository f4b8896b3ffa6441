"""Rows of activations in INT8 times a weight in panels (see linear_w8a8/mlir_rows.py)."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_kernels.builder.values import Value, constant
from compiled_kernels.builder.vectors import dot_bytes, dot_bytes_in_pairs, dot_words
from compiled_kernels.linear_w8a8.mlir_rows import Int8Rows


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
