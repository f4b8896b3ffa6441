"""Operations on vectors beyond arithmetic: the processor's dot products, sums across a vector, and loops over rows of
memory."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_kernels.builder.functions import loop
from compiled_kernels.builder.values import Value, constant, exp, fma, intrinsic, negative, sqrt, typed


def dot_pairs(sums: Value, a: Value, b: Value) -> Value:
    """Return `sums` [16] plus the products of 16 pairs of bfloat16: each sum gets both products of its pair
    (AVX512_BF16: VDPBF16PS).
    """
    return intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", sums.type, sums, a, b)


def dot_bytes(sums: Value, a: Value, b: Value) -> Value:
    """Return 16 sums plus, for each, the products of four unsigned bytes of `a` with four signed bytes of `b`. All
    three operands are vectors of 16 words of 32 bits (AVX512_VNNI: VPDPBUSD)."""
    return intrinsic("llvm.x86.avx512.vpdpbusd.512", sums.type, sums, a.bits("i8"), b.bits("i8"))


def dot_bytes_in_pairs(a: Value, b: Value) -> Value:
    """Multiply unsigned bytes of `a` with signed bytes of `b`, both vectors of 32-bit words, and return the sums of
    adjacent products as int16. Sums outside the range of int16 saturate (VPMADDUBSW)."""
    name = "llvm.x86.avx512.pmaddubs.w.512" if a.lanes == 16 else "llvm.x86.avx2.pmadd.ub.sw"
    return intrinsic(name, typed("i16", 2 * a.lanes), a.bits("i8"), b.bits("i8"))


def dot_words(a: Value, b: Value) -> Value:
    """Multiply the int16 numbers of `a` and `b`, and return the exact sums of adjacent products as 32-bit words
    (VPMADDWD).
    """
    a, b = a.bits("i16"), b.bits("i16")
    name = "llvm.x86.avx512.pmaddw.d.512" if a.lanes == 32 else "llvm.x86.avx2.pmadd.wd"
    return intrinsic(name, typed("i32", a.lanes // 2), a, b)


def broadcast_pair(pair: Value) -> Value:
    """Return a vector with one pair of bfloat16 repeated 16 times: an operand of `dot_pairs`."""
    return pair.bits("i32").at(0).broadcast(16).bits("bf16")


def look_up(table: Sequence[float], codes: Value) -> Value:
    """Look up the lowest bits of 32 integers of 16 bits in a table of 16 or 32 numbers, held in a register; return
    bfloat16 (AVX512BW: VPERMW). A table of 64 uses VPERMI2W."""
    halves = codes.bits("i16")
    if len(table) <= 32:
        numbers = constant([*table] * (32 // len(table)), "bf16").bits("i16")
        return intrinsic("llvm.x86.avx512.permvar.hi.512", halves.type, numbers, halves).bits("bf16")
    low, high = (constant(part, "bf16").bits("i16") for part in (table[:32], table[32:]))
    return intrinsic("llvm.x86.avx512.vpermi2var.hi.512", halves.type, low, halves, high).bits("bf16")


def look_up_floats(table: Sequence[float], codes: Value) -> Value:
    """Look up the lowest four bits of 16 words in a table of 16 numbers (AVX512F: VPERMPS)."""
    return intrinsic("llvm.x86.avx512.permvar.sf.512", typed("f32", 16), constant(table, "f32"), codes)


def look_up_bytes(table: Sequence[int], codes: Value) -> Value:
    """Look up bytes below 16 in a table of 16 bytes (VPSHUFB)."""
    name = "llvm.x86.avx512.pshuf.b.512" if codes.lanes == 16 else "llvm.x86.avx2.pshuf.b"
    places = codes.bits("i8")
    return intrinsic(name, places.type, constant([*table] * (places.lanes // 16), "i8"), places).bits("i32")


def total(value: Value) -> Value:
    """Return the sum of a vector's elements: its halves are added until one number is left, in the same order as in
    `totals`.
    """
    while value.lanes > 1:
        half = value.lanes // 2
        value = value.part(0, half) + value.part(half, half)
    return value.at(0)


def totals(vectors: Sequence[Value]) -> Value:
    """Return a vector with the sum of each given vector; there are as many vectors as each has elements. Each round
    folds two vectors into one, which takes fewer additions than a reduction for each vector."""
    lanes = vectors[0].lanes
    step = lanes // 2
    while len(vectors) > 1:
        half, folded = len(vectors) // 2, []
        for a, b in zip(vectors[:half], vectors[half:], strict=True):
            # element i of the sum: a's fold where bit `step` is clear, b's where it is set
            low = [i if not i & step else lanes + (i ^ step) for i in range(lanes)]
            high = [i | step if not i & step else lanes + i for i in range(lanes)]
            folded.append(a.shuffle(b, low) + a.shuffle(b, high))
        vectors, step = folded, step // 2
    return vectors[0]


def silu(value: Value) -> Value:
    """Return SiLU, x / (1 + exp(-x))."""
    return value / (exp(negative(value)) + 1.0)


def copy(
    source: Value, taken: Sequence[Value | int], out: Value, place: Sequence[Value | int], width: int, lanes: int
) -> None:
    """Emit a copy of `width` numbers along the last index, out[*place, ...] = source[*taken, ...], converted to the
    type of `out`.
    """
    with loop(0, width, lanes) as turn:
        value = source.load(lanes, *taken[:-1], turn.index + taken[-1])
        out.store(value.to(out.element), *place[:-1], turn.index + place[-1])


def norm_factor(x: Value, row: Value, first: Value | int, width: int, eps: float, lanes: int) -> Value:
    """Return the RMS norm's factor 1 / sqrt(mean(x²) + eps) over `width` columns of one row, from `first` on, as a
    vector.
    """
    with loop(0, width, lanes, [constant(0.0, "f32", lanes)]) as turn:
        value = x.load(lanes, row, turn.index + first)
        turn.carry([fma(value, value, turn.carried[0])])
    mean = total(turn.results[0]) / width
    return (mean.like(1.0) / sqrt(mean + eps)).broadcast(lanes)


def tanh(doubled: Value) -> Value:
    """Return tanh(x) = 1 - 2 / (exp(2x) + 1), given `doubled` = 2x."""
    return doubled.like(1.0) - doubled.like(2.0) / (exp(doubled) + 1.0)
