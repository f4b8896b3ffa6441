"""The innermost step of every product in panels: vectors of words of the weight times a few rows of x, in registers.

Arithmetic is float32, or dot products of bfloat16 pairs. A word is unpacked into its `parts`, each of which is one
multiplication: of float32, one value; with pairs, two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compiled_kernels.linear.mlir_codes import word_vectors
from compiled_kernels.mlir_text import Lines, vector


class InputRows(NamedTuple):
    """Some rows of x at work, as MLIR names: `memory` of memref `type` whose numbers are of `kind`."""

    memory: str
    type: str
    kind: str
    rows: Sequence[str]


def step_sums(
    lines: Lines,
    words: Sequence[str],
    kind: str,
    x: InputRows,
    column: str,
    sums: Sequence[str],
    lanes: int,
    pairs: bool,
    scales: Sequence[str] = (),
) -> list[str]:
    """Emit `sums` (of row 0 for each vector of words, of row 1, ...) moved on by what the `words` hold: vectors of
    i32, side by side, whose first values stand at `column` of x; times `scales`, one for each, where there are such."""
    unpacked = [unpack(lines, each, kind, lanes, pairs) for each in words]
    if scales:
        unpacked = [scaled_parts(lines, parts, scale, lanes) for parts, scale in zip(unpacked, scales, strict=True)]
    sums, wide = list(sums), len(words)
    for row, name in enumerate(x.rows):
        factors = _factors(lines, x, name, column, len(unpacked[0]), lanes, pairs)
        for part, factor in enumerate(factors):
            for i, weight in enumerate(unpacked):
                at = row * wide + i
                sums[at] = multiply(lines, sums[at], weight[part], factor, lanes, pairs)
    return sums


def multiply(lines: Lines, sums: str, weight: str, factor: str, lanes: int, pairs: bool) -> str:
    return lines.dot_pairs(sums, weight, factor) if pairs else lines.fma(weight, factor, sums, lanes)


def group_scales(lines: Lines, memory: str, at: str, type: str, kind: str, lanes: int) -> str:
    """Emit scales of groups of a weight of `kind`, from the place `at` of a `memory` of memref `type`, in float32."""
    if kind != "f4":
        return lines.extend(lines.load(memory, at, type, lanes, "f16"), lanes, "f16")
    integers, given = vector(lanes, "i32"), lines.load(memory, at, type, lanes, "i8")
    wide = lines.let(f"arith.extui {given} : {vector(lanes, 'i8')} to {integers}")
    normal = lines.let(f"arith.shli {wide}, {lines.constant('23', lanes, 'i32')} : {integers}")
    ends = [
        lines.let(f"arith.cmpi eq, {wide}, {lines.constant(end, lanes, 'i32')} : {integers}") for end in ("0", "255")
    ]
    special = lines.let(f"arith.ori {ends[0]}, {ends[1]} : {vector(lanes, 'i1')}")  # subnormal, and not a number
    bit, none = lines.constant(str(1 << 22), lanes, "i32"), lines.constant("0", lanes, "i32")
    more = lines.let(f"arith.select {special}, {bit}, {none} : {vector(lanes, 'i1')}, {integers}")
    bits = lines.let(f"arith.ori {normal}, {more} : {integers}")
    return lines.let(f"arith.bitcast {bits} : {integers} to {vector(lanes)}")


def scaled_parts(lines: Lines, parts: Sequence[str], scale: str, lanes: int) -> list[str]:
    return [lines.let(f"arith.mulf {part}, {scale} : {vector(lanes)}") for part in parts]


def unpack(lines: Lines, words: str, kind: str, lanes: int, pairs: bool) -> list[str]:
    """Emit the parts of a vector of words, in the order of the width."""
    integers = vector(lanes, "i32")
    if kind == "f32":
        return [lines.let(f"arith.bitcast {words} : {integers} to {vector(lanes)}")]
    if kind == "bf16":
        if pairs:
            return [lines.let(f"vector.bitcast {words} : {integers} to {vector(2 * lanes, 'bf16')}")]
        return _halves(lines, words, lanes)
    if kind != "i8":
        return word_vectors(lines, kind, words, lanes)
    floats = [_byte(lines, words, place, lanes) for place in range(4)]
    if not pairs:
        return floats
    return [_paired(lines, floats[i], floats[i + 1], lanes) for i in (0, 2)]


def _halves(lines: Lines, words: str, lanes: int) -> list[str]:
    """Emit two bfloat16 of each word as float32, of which bfloat16 are the upper halves."""
    integers = vector(lanes, "i32")
    sixteen, mask = lines.constant("16", lanes, "i32"), lines.constant("-65536", lanes, "i32")
    low = lines.let(f"arith.shli {words}, {sixteen} : {integers}")
    high = lines.let(f"arith.andi {words}, {mask} : {integers}")
    return [lines.let(f"arith.bitcast {half} : {integers} to {vector(lanes)}") for half in (low, high)]


def _byte(lines: Lines, words: str, place: int, lanes: int) -> str:
    """Emit one byte of each word, which has a sign, as float32."""
    integers = vector(lanes, "i32")
    if place < 3:
        words = lines.let(f"arith.shli {words}, {lines.constant(str(24 - 8 * place), lanes, 'i32')} : {integers}")
    value = lines.let(f"arith.shrsi {words}, {lines.constant('24', lanes, 'i32')} : {integers}")
    return lines.let(f"arith.sitofp {value} : {integers} to {vector(lanes)}")


def _paired(lines: Lines, first: str, second: str, lanes: int) -> str:
    """Emit float32 that bfloat16 holds exactly, as pairs of such."""
    integers = vector(lanes, "i32")
    low, high = (lines.let(f"arith.bitcast {each} : {vector(lanes)} to {integers}") for each in (first, second))
    low = lines.let(f"arith.shrui {low}, {lines.constant('16', lanes, 'i32')} : {integers}")
    words = lines.let(f"arith.ori {low}, {high} : {integers}")  # the lower half of such a float32 is zero
    return lines.let(f"vector.bitcast {words} : {integers} to {vector(2 * lanes, 'bf16')}")


def _factors(lines: Lines, x: InputRows, row: str, column: str, parts: int, lanes: int, pairs: bool) -> list[str]:
    """Spread the factors of each part of the words over every element of a vector: numbers of one row of x from
    `column` on."""
    columns = [column] + [
        lines.let(f"arith.addi {column}, {lines.index(i)} : index") for i in range(1, parts * (2 if pairs else 1))
    ]
    if pairs:
        return [lines.splat_pair(lines.load(x.memory, f"{row}, {at}", x.type, 2, "bf16")) for at in columns[::2]]
    if x.kind == "f32":
        return [lines.splat(lines.let(f"memref.load {x.memory}[{row}, {at}] : {x.type}"), lanes) for at in columns]
    return [value for at in columns[::2] for value in _spread_halves(lines, x, row, at, lanes)][:parts]


def _spread_halves(lines: Lines, x: InputRows, row: str, column: str, lanes: int) -> list[str]:
    """Emit two bfloat16 of a row as float32, each in every element of a vector."""
    pair = lines.load(x.memory, f"{row}, {column}", x.type, 2, "bf16")
    bits = lines.let(f"vector.bitcast {pair} : vector<2xbf16> to vector<1xi32>")
    single = lines.let(f"vector.extract {bits}[0] : i32 from vector<1xi32>")
    return _halves(lines, lines.let(f"vector.broadcast {single} : i32 to {vector(lanes, 'i32')}"), lanes)
