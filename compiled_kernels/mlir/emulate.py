"""Emulate instructions that the machine lacks by arithmetic that it has, so that every machine can check the kernels of
every level.

Only the instructions named in `builder/vectors.py` are replaced; LLVM splits vectors that are too long for the machine.
Emulation is slow and for checks only (see `limited_to`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiled_kernels.builder.values import Value, constants_at, mlir
from compiled_kernels.mlir.rewrites import find_operations


def emulate_instructions(module: Any) -> None:
    """Replace every instruction of AVX-512 in `module`, in place."""
    with module.context, mlir().ir.Location.unknown():
        for function in find_operations(module, "func.func"):
            calls = find_operations(function, "llvm.call_intrinsic")
            if calls:
                constants_at(function.regions[0].blocks[0])
            for call in calls:
                name = str(call.attributes["intrin"]).strip('"')
                if (emulated := EMULATED.get(name.removeprefix("llvm.x86."))) is None:
                    continue
                with mlir().ir.InsertionPoint(call):
                    found = emulated(*(Value(each) for each in call.operands))
                call.results[0].replace_all_uses_with(found.ir)
                call.erase()


def _dot_pairs(sums: Value, a: Value, b: Value) -> Value:
    """VDPBF16PS: the odd numbers of the pairs, then the even ones."""
    a, b = a.bits("i32"), b.bits("i32")
    sums = sums + (a & -65536).bits("f32") * (b & -65536).bits("f32")
    return sums + (a << 16).bits("f32") * (b << 16).bits("f32")


def _dot_bytes(sums: Value, a: Value, b: Value) -> Value:
    """VPDPBUSD: bytes without a sign by bytes with one."""
    a, b = a.bits("i32"), b.bits("i32")
    for first in (0, 8, 16, 24):
        sums = sums + ((a >> first) & 0xFF) * (b << (24 - first)).signed_shift(24)
    return sums


def _dot_words(a: Value, b: Value) -> Value:
    """VPMADDWD: pairs of int16."""
    a, b = a.bits("i32"), b.bits("i32")
    low = (a << 16).signed_shift(16) * (b << 16).signed_shift(16)
    return low + a.signed_shift(16) * b.signed_shift(16)


def _dot_bytes_in_pairs(a: Value, b: Value) -> Value:
    """VPMADDUBSW: pairs of bytes without a sign by bytes with one, to int16, which saturates."""
    a, b = a.bits("i16"), b.bits("i16")
    sums = (a & 0xFF).to("i32") * (b << 8).signed_shift(8).to("i32")
    sums = sums + (a >> 8).to("i32") * b.signed_shift(8).to("i32")
    for how, most in (("slt", (1 << 15) - 1), ("sgt", -(1 << 15))):
        sums = sums.compared(how, most).select(sums, sums.like(most))
    return sums.to("i16")


def _look_up(codes: Value, *tables: Value) -> Value:
    """VPERMW, VPERMPS, VPERMI2W: look up numbers of a table by index; upper bits of an index are ignored."""
    numbers = [table.at(place) for table in tables for place in range(table.lanes)]
    places = codes & (len(numbers) - 1)
    found = numbers[0].broadcast(codes.lanes)
    for place, number in enumerate(numbers):
        found = places.equals(place).select(number.broadcast(codes.lanes), found)
    return found


EMULATED: dict[str, Callable[..., Value]] = {
    "avx512bf16.dpbf16ps.512": _dot_pairs,
    "avx512.vpdpbusd.512": _dot_bytes,
    "avx512.pmaddw.d.512": _dot_words,
    "avx512.pmaddubs.w.512": _dot_bytes_in_pairs,
    "avx512.pshuf.b.512": lambda table, codes: _look_up(codes, table.part(0, 16)),  # all parts of the table are equal
    "avx512.permvar.hi.512": lambda table, codes: _look_up(codes, table),
    "avx512.permvar.sf.512": lambda table, codes: _look_up(codes, table),
    "avx512.vpermi2var.hi.512": lambda low, codes, high: _look_up(codes, low, high),
}
