"""Rows of activations in INT8 times a weight in panels (see linear_w8a8/mlir_rows.py)."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_kernels.builder.values import Value
from compiled_kernels.builder.vectors import dot_bytes, dot_words
from compiled_kernels.linear_w8a8.mlir_rows import ADDED, SCALE, Int8Rows


def unpacked(rows: Int8Rows, words: Value) -> list[Value]:
    """Return a vector of a panel's words as vectors of what the words of a row are multiplied by."""
    if rows.values == 4:
        return [words ^ -0x7F7F7F80]  # 0x80808080
    halves = words.bits("i16")
    return [each.signed_shift(8).bits("i32") for each in (halves << 8, halves)]


def panel_sums(
    rows: Int8Rows,
    parts: Sequence[Sequence[Value]],
    x: Value,
    places: Sequence[Value],
    at: Value,
    sums: Sequence[Value],
) -> list[Value]:
    """Return `sums` (of row 0 for each vector of words, of row 1, ...) moved on by vectors of a panel's words, side by
    side and unpacked into `parts`; each row's words are those from `at` on."""
    sums = list(sums)
    for row, place in enumerate(places):
        for part in range(len(parts[0])):
            factor = x[place, at + part].spread(rows.lanes)
            for i, weight in enumerate(parts):
                here = row * len(parts) + i
                sums[here] = _dot(rows, sums[here], weight[part], factor)
    return sums


def _dot(rows: Int8Rows, sums: Value, weights: Value, x: Value) -> Value:
    return dot_bytes(sums, weights, x) if rows.values == 4 else sums + dot_words(weights, x)


def row_scale(rows: Int8Rows, x: Value, row: Value) -> tuple[Value, Value]:
    """Return a row's scale (f32), and what is added to its sums (i32)."""
    scale, added = (x[row, rows.words + offset] for offset in (SCALE, ADDED))
    return scale.bits("f32"), added


def scaled(sums: Value, scale: Value, added: Value) -> Value:
    """Return a vector of a row's int32 sums as float32, times the row's scale."""
    return (sums + added.spread(sums.lanes)).to("f32") * scale.spread(sums.lanes)
