"""Codes of matrices in few bits as vectors of numbers: exact, in registers, at any level of the instruction set.

Kinds of codes are named as MLIR names types: `i8`; `i4`, whose half byte is its value + 8; `u4`, 0 to 15; `f8`, E4M3
(1 sign, 4 exponent and 3 fraction bits, bias 7; 0x7f and 0xff are NaN and not for these kernels); `f4`, E2M1 (1, 2 and
1 bits, bias 1). A byte of 4-bit codes holds two numbers, one in its lower half and one in its upper half; which columns
of a row those are is the caller's layout.

Floats are moved to their places in float16, whose subnormal numbers the processor converts at full speed and whatever
its mode for subnormal numbers is. There they are too small by `CODE_UNITS`, a power of two that the caller multiplies
scales or sums by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from compiled_kernels.backends import BackendError
from compiled_kernels.mlir_text import Lines, vector

CODE_BITS = {"i8": 8, "i4": 4, "u4": 4, "f8": 8, "f4": 4}
CODE_UNITS = {"f8": 2.0**8, "f4": 2.0**14}
TABLES: dict[str, Sequence[float]] = {
    "i4": range(-8, 8),
    "u4": range(16),
    "f4": [sign * value * 2.0**-15 for sign in (1, -1) for value in (0, 1, 2, 3, 4, 6, 8, 12)],
}


def code_kind(codes: torch.dtype, with_minima: bool) -> str:
    """Return the kind of codes (see mlir_codes.py) that a tensor of this type holds, beside minima or without."""
    kinds = {torch.int32: "u4" if with_minima else "i4", torch.int8: "i8", torch.float8_e4m3fn: "f8"}
    if codes not in kinds:
        known = "int32, int8 or float8_e4m3fn"
        raise BackendError(f"linear_grouped: backend mlir wants codes as {known}; {codes} given")
    return kinds[codes]


def code_unit(kind: str) -> float:
    """Return the number that `code_vectors` of this kind are too small by; 1 for integers."""
    return CODE_UNITS.get(kind, 1.0)


def code_vectors(
    lines: Lines, kind: str, loaded: str, count: int, element: str = "f32", joined: bool = False
) -> list[str]:
    """Emit `count` loaded bytes of codes as vectors of numbers, each 1 / `code_unit(kind)` times its value.

    Args:
        lines: the text.
        kind: a key of CODE_BITS.
        loaded: the bytes, a vector of i8.
        count: how many; in bfloat16 a vector of numbers is 32 long.
        element: f32; or bf16, which holds every code exactly, for a target with dot products of pairs.
        joined: 4-bit codes become one vector, lower halves before upper ones.

    Returns:
        One vector of `count` numbers; of 4-bit codes that are not joined two, the lower halves and the upper ones.
    """
    if CODE_BITS[kind] == 8:
        floats = (
            lines.extend(loaded, count, "i8") if kind == "i8" else _from_half(lines, _e4m3(lines, loaded, count), count)
        )
        return [lines.truncate(floats, count, element)]
    if element == "f32" and kind == "f4":
        found = [_from_half(lines, _e2m1(lines, loaded, count, upper), count) for upper in (False, True)]
        return [_joined(lines, found, count, "f32")] if joined else found
    octets = vector(count, "i8")
    low = lines.let(f"arith.andi {loaded}, {lines.constant('15', count, 'i8')} : {octets}")
    high = lines.let(f"arith.shrui {loaded}, {lines.constant('4', count, 'i8')} : {octets}")
    halves: Iterable[str] = (low, high)
    if element == "f32" and kind == "i4":
        eight = lines.constant("8", count, "i8")
        halves = (lines.let(f"arith.subi {half}, {eight} : {octets}") for half in (low, high))
    if joined:
        halves, count = [_joined(lines, list(halves), count, "i8")], 2 * count
    if element == "f32":
        return [lines.extend(half, count, "i8") for half in halves]
    return [_looked_up(lines, kind, half) for half in halves]


def word_vectors(lines: Lines, kind: str, words: str, lanes: int) -> list[str]:
    """Emit a vector of words of eight 4-bit codes each (`i4`, `f4`) as eight vectors of their numbers, the lowest bits
    first: each number stands where its word does, and is the value itself."""
    integers, floats = vector(lanes, "i32"), vector(lanes)
    numbers = [value * code_unit(kind) for value in TABLES[kind]]

    def moved(by: int, how: str) -> str:
        return lines.let(f"arith.{how} {words}, {lines.constant(str(by), lanes, 'i32')} : {integers}") if by else words

    if lanes == 16:  # AVX512F: VPERMPS reads the lowest four bits of an index
        table = lines.constant(str([f"{value:.1f}" for value in numbers]).replace("'", ""), lanes)
        name = "llvm.x86.avx512.permvar.sf.512"
        return [_permuted(lines, name, table, moved(4 * place, "shrui"), lanes) for place in range(8)]
    if kind == "i4":
        words = lines.let(f"arith.xori {words}, {lines.constant(str(-0x77777778), lanes, 'i32')} : {integers}")
        tops = [moved(28 - 4 * place, "shli") for place in range(8)]
        down = lines.constant("28", lanes, "i32")
        values = [lines.let(f"arith.shrsi {top}, {down} : {integers}") for top in tops]
        return [lines.let(f"arith.sitofp {value} : {integers} to {floats}") for value in values]
    table = lines.constant(str([f"{value:.1f}" for value in numbers[:8]]).replace("'", ""), lanes)
    sign, found = lines.constant(str(-(1 << 31)), lanes, "i32"), []
    for place in range(8):  # AVX2: VPERMPS reads the lowest three bits
        size = _permuted(lines, "llvm.x86.avx2.permps", table, moved(4 * place, "shrui"), lanes)
        bits = lines.let(f"arith.bitcast {size} : {floats} to {integers}")
        below = lines.let(f"arith.andi {moved(28 - 4 * place, 'shli')}, {sign} : {integers}")
        found.append(
            lines.let(f"arith.bitcast {lines.let(f'arith.ori {bits}, {below} : {integers}')} : {integers} to {floats}")
        )
    return found


def _permuted(lines: Lines, name: str, table: str, index: str, lanes: int) -> str:
    kinds = f"({vector(lanes)}, {vector(lanes, 'i32')}) -> {vector(lanes)}"
    return lines.let(f'llvm.call_intrinsic "{name}"({table}, {index}) : {kinds}')


def _joined(lines: Lines, halves: list[str], count: int, element: str) -> str:
    kind = vector(count, element)
    return lines.let(f"vector.shuffle {halves[0]}, {halves[1]} {list(range(2 * count))} : {kind}, {kind}")


def _looked_up(lines: Lines, kind: str, codes: str) -> str:
    """Emit 32 codes 0..15 as bfloat16, by a table in a register (AVX512BW: VPERMW)."""
    table = torch.tensor(TABLES[kind], dtype=torch.bfloat16).view(torch.int16).tolist() * 2
    words = lines.let(f"arith.extui {codes} : vector<32xi8> to vector<32xi16>")
    values = lines.constant(str(table), 32, "i16")
    found = lines.let(
        f'llvm.call_intrinsic "llvm.x86.avx512.permvar.hi.512"({values}, {words}) : '
        "(vector<32xi16>, vector<32xi16>) -> vector<32xi16>"
    )
    return lines.let(f"vector.bitcast {found} : vector<32xi16> to vector<32xbf16>")


def _e4m3(lines: Lines, loaded: str, count: int) -> str:
    """Emit float16 bits of E4M3: s eeee mmm becomes s 0eeee mmm0000000; the sign was extended, its second copy goes."""
    halves = vector(count, "i16")
    wide = lines.let(f"arith.extsi {loaded} : {vector(count, 'i8')} to {halves}")
    moved = lines.let(f"arith.shli {wide}, {lines.constant('7', count, 'i16')} : {halves}")
    return lines.let(f"arith.andi {moved}, {lines.constant(str(~(1 << 14)), count, 'i16')} : {halves}")


def _e2m1(lines: Lines, loaded: str, count: int, upper: bool) -> str:
    """Emit float16 bits of E2M1 in the lower or upper halves: s ee m becomes s 000ee m000000000."""
    halves = vector(count, "i16")
    wide = lines.let(f"arith.extui {loaded} : {vector(count, 'i8')} to {halves}")
    top = lines.let(f"arith.shli {wide}, {lines.constant('8' if upper else '12', count, 'i16')} : {halves}")
    moved = lines.let(f"arith.shrsi {top}, {lines.constant('3', count, 'i16')} : {halves}")
    return lines.let(f"arith.andi {moved}, {lines.constant(str(0x0E00 - (1 << 15)), count, 'i16')} : {halves}")


def _from_half(lines: Lines, bits: str, count: int) -> str:
    floats = lines.let(f"vector.bitcast {bits} : {vector(count, 'i16')} to {vector(count, 'f16')}")
    return lines.extend(floats, count, "f16")
