"""Compute with vectors beyond arithmetic: dot products of the processor's own, sums across a vector, and
rows of memory that are walked a vector at a time."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_kernels.builder.functions import loop
from compiled_kernels.builder.values import Value, constant, exp, fma, intrinsic, negative, sqrt, typed


def dot_pairs(sums: Value, a: Value, b: Value) -> Value:
    """Add to sums [16] the products of 16 pairs of bfloat16 (AVX512_BF16: VDPBF16PS)."""
    return intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", sums.type, sums, a, b)


def dot_bytes(sums: Value, a: Value, b: Value) -> Value:
    """Add to sums [16] the products of 16 times four bytes, those of `a` unsigned, those of `b` signed; all three
    are 16 words of 32 bits (AVX512_VNNI: VPDPBUSD)."""
    return intrinsic("llvm.x86.avx512.vpdpbusd.512", sums.type, sums, a.bits("i8"), b.bits("i8"))


def dot_bytes_in_pairs(a: Value, b: Value) -> Value:
    """Return as int16 the sums of products of pairs of bytes, those of `a` unsigned, those of `b` signed, both words of
    32 bits; what int16 does not hold saturates (VPMADDUBSW)."""
    name = "llvm.x86.avx512.pmaddubs.w.512" if a.lanes == 16 else "llvm.x86.avx2.pmadd.ub.sw"
    return intrinsic(name, typed("i16", 2 * a.lanes), a.bits("i8"), b.bits("i8"))


def dot_words(a: Value, b: Value) -> Value:
    """Return the sums of products of pairs of int16, exact; words of 32 bits (VPMADDWD)."""
    a, b = a.bits("i16"), b.bits("i16")
    name = "llvm.x86.avx512.pmaddw.d.512" if a.lanes == 32 else "llvm.x86.avx2.pmadd.wd"
    return intrinsic(name, typed("i32", a.lanes // 2), a, b)


def broadcast_pair(pair: Value) -> Value:
    """Return a vector of 16 times one pair of bfloat16: the partner of 16 pairs in `dot_pairs`."""
    return pair.bits("i32").at(0).broadcast(16).bits("bf16")


def look_up(table: Sequence[float], codes: Value) -> Value:
    """Return numbers of a table of 16 or 32 (in a register) for the lowest bits of 32 times 16 bits, as bfloat16
    (AVX512BW: VPERMW); of a table of 64 (VPERMI2W)."""
    halves = codes.bits("i16")
    if len(table) <= 32:
        numbers = constant([*table] * (32 // len(table)), "bf16").bits("i16")
        return intrinsic("llvm.x86.avx512.permvar.hi.512", halves.type, numbers, halves).bits("bf16")
    low, high = (constant(part, "bf16").bits("i16") for part in (table[:32], table[32:]))
    return intrinsic("llvm.x86.avx512.vpermi2var.hi.512", halves.type, low, halves, high).bits("bf16")


def look_up_floats(table: Sequence[float], codes: Value) -> Value:
    """Return numbers of a table of 16 for the lowest four bits of 16 words (AVX512F: VPERMPS)."""
    return intrinsic("llvm.x86.avx512.permvar.sf.512", typed("f32", 16), constant(table, "f32"), codes)


def look_up_bytes(table: Sequence[int], codes: Value) -> Value:
    """Return numbers of a table of 16 for bytes below 16, as bytes (VPSHUFB)."""
    name = "llvm.x86.avx512.pshuf.b.512" if codes.lanes == 16 else "llvm.x86.avx2.pshuf.b"
    places = codes.bits("i8")
    return intrinsic(name, places.type, constant([*table] * (places.lanes // 16), "i8"), places).bits("i32")


def total(value: Value) -> Value:
    """Return the sum across a vector: halves are added until one number is left, in the order of `totals`."""
    while value.lanes > 1:
        half = value.lanes // 2
        value = value.part(0, half) + value.part(half, half)
    return value.at(0)


def totals(vectors: Sequence[Value]) -> Value:
    """Return the totals of as many vectors as each has numbers: in each round two are folded into one, so that the
    whole takes that many additions less one in place of as many reductions."""
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
    """Return x / (1 + exp(-x))."""
    return value / (exp(negative(value)) + 1.0)


def copy(
    source: Value, taken: Sequence[Value | int], out: Value, place: Sequence[Value | int], width: int, lanes: int
) -> None:
    """Make out[*place, ...] = source[*taken, ...]: `width` numbers, in the type of `out`, from the last index on."""
    with loop(0, width, lanes) as turn:
        value = source.load(lanes, *taken[:-1], turn.index + taken[-1])
        out.store(value.to(out.element), *place[:-1], turn.index + place[-1])


def norm_factor(x: Value, row: Value, first: Value | int, width: int, eps: float, lanes: int) -> Value:
    """Return 1 / sqrt(mean(x²) + eps) of `width` columns of a row, from `first` on, as a vector."""
    with loop(0, width, lanes, [constant(0.0, "f32", lanes)]) as turn:
        value = x.load(lanes, row, turn.index + first)
        turn.carry([fma(value, value, turn.carried[0])])
    mean = total(turn.results[0]) / width
    return (mean.like(1.0) / sqrt(mean + eps)).broadcast(lanes)


def tanh(doubled: Value) -> Value:
    """Return tanh x = 1 - 2 / (exp(2x) + 1), of 2x."""
    return doubled.like(1.0) - doubled.like(2.0) / (exp(doubled) + 1.0)
