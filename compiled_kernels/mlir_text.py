"""Pieces of MLIR text that the hand-written kernels share: vector widths, conversions, sums, exp.

A kernel is a function of the func, scf, arith, memref and vector dialects on static memrefs. Where a processor has an
instruction that no dialect names (bfloat16 dot products, table look-ups) and `Target` says so, it is called as an
LLVM intrinsic; without it the same function is written in plain vector arithmetic.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "i8",
    torch.uint8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Target:
    """What kernels may count on: lanes of float32 a vector, and dot products of bfloat16 pairs."""

    lanes: int = 8
    bf16_dots: bool = False

    @classmethod
    @functools.cache
    def here(cls) -> Target:
        """This machine, by /proc/cpuinfo; plain vectors of 8 where there is none."""
        try:
            flags = set(re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0].split())
        except (OSError, IndexError):
            return cls()
        return cls(lanes=16 if "avx512f" in flags else 8, bf16_dots={"avx512f", "avx512_bf16"} <= flags)


def divisor(count: int, most: int) -> int:
    """The largest power of two up to `most` that divides `count`."""
    return next(size for size in (64, 32, 16, 8, 4, 2, 1) if size <= most and count % size == 0)


def memref(shape: Iterable[int], kind: str) -> str:
    return f"memref<{'x'.join(map(str, shape))}x{kind}>"


def number(value: float) -> str:
    """A float32 constant as MLIR reads it: always with a point."""
    return f"{value:.9e}"


class Lines:
    """MLIR text under construction: `say` adds a line, `let` adds one that defines a value and gives its name."""

    def __init__(self, prefix: str = "v") -> None:
        self.lines: list[str] = []
        self._prefix = prefix
        self._count = 0

    def say(self, line: str) -> None:
        self.lines.append(line)

    def let(self, expression: str) -> str:
        self._count += 1
        name = f"%{self._prefix}{self._count}"
        self.lines.append(f"{name} = {expression}")
        return name

    def index(self, value: int) -> str:
        return self.let(f"arith.constant {value} : index")

    def load(self, memory: str, at: str, kind: str, lanes: int, element: str) -> str:
        """`lanes` numbers from `memory`, of memref type `kind`, at the indices `at`."""
        return self.let(f"vector.load {memory}[{at}] : {kind}, vector<{lanes}x{element}>")

    def wide(self, value: str, lanes: int, element: str) -> str:
        """A vector as float32."""
        if element == "f32":
            return value
        vector, floats = f"vector<{lanes}x{element}>", f"vector<{lanes}xf32>"
        if element == "i8":
            integers = self.let(f"arith.extsi {value} : {vector} to vector<{lanes}xi32>")
            return self.let(f"arith.sitofp {integers} : vector<{lanes}xi32> to {floats}")
        return self.let(f"arith.extf {value} : {vector} to {floats}")

    def narrow(self, value: str, lanes: int, element: str) -> str:
        """A vector of float32 rounded to `element`."""
        if element == "f32":
            return value
        return self.let(f"arith.truncf {value} : vector<{lanes}xf32> to vector<{lanes}x{element}>")

    def splat(self, scalar: str, lanes: int) -> str:
        return self.let(f"vector.broadcast {scalar} : f32 to vector<{lanes}xf32>")

    def fma(self, a: str, b: str, c: str, lanes: int) -> str:
        return self.let(f"vector.fma {a}, {b}, {c} : vector<{lanes}xf32>")

    def dot_pairs(self, sums: str, a: str, b: str) -> str:
        """sums [16] + the products of 16 pairs of bfloat16 (AVX512_BF16: VDPBF16PS)."""
        pairs = "vector<32xbf16>"
        return self.let(
            f'llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"({sums}, {a}, {b}) : '
            f"(vector<16xf32>, {pairs}, {pairs}) -> vector<16xf32>"
        )

    def total(self, vector: str, lanes: int) -> str:
        return self.let(f"vector.reduction <add>, {vector} : vector<{lanes}xf32> into f32")

    def totals(self, vectors: list[str], lanes: int) -> str:
        """The sums of `lanes` vectors of `lanes` as one vector: in each round two are folded into one, so that
        the whole takes lanes - 1 additions in place of as many reductions."""
        kind, step = f"vector<{lanes}xf32>", lanes // 2
        while len(vectors) > 1:
            half = len(vectors) // 2
            folded = []
            for a, b in zip(vectors[:half], vectors[half:], strict=True):
                # lane i of the sum: a's fold where bit `step` is clear, b's where it is set
                low = [i if not i & step else lanes + (i ^ step) for i in range(lanes)]
                high = [i | step if not i & step else lanes + i for i in range(lanes)]
                left = self.let(f"vector.shuffle {a}, {b} {low} : {kind}, {kind}")
                right = self.let(f"vector.shuffle {a}, {b} {high} : {kind}, {kind}")
                folded.append(self.let(f"arith.addf {left}, {right} : {kind}"))
            vectors, step = folded, step // 2
        return vectors[0]

    def text(self) -> str:
        return "\n".join(self.lines)


def exp_function(lanes: int) -> str:
    """@exp: e to the x of float32, by 2^n times a polynomial (Cephes' expf: within 2 ulp); below -87 almost 0."""
    kind, whole = f"vector<{lanes}xf32>", f"vector<{lanes}xi32>"
    lines = Lines()

    def constant(value: float) -> str:
        return lines.let(f"arith.constant dense<{number(value)}> : {kind}")

    x = lines.let(f"arith.maximumf %x, {constant(-87.0)} : {kind}")
    x = lines.let(f"arith.minimumf {x}, {constant(88.0)} : {kind}")
    power = lines.let(f"arith.mulf {x}, {constant(1.4426950408889634)} : {kind}")
    n = lines.let(f"math.roundeven {power} : {kind}")
    r = lines.let(f"vector.fma {n}, {constant(-0.693359375)}, {x} : {kind}")
    r = lines.let(f"vector.fma {n}, {constant(2.12194440e-4)}, {r} : {kind}")
    p = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = lines.let(f"vector.fma {p}, {r}, {constant(coefficient)} : {kind}")
    square = lines.let(f"arith.mulf {r}, {r} : {kind}")
    p = lines.let(f"vector.fma {p}, {square}, {r} : {kind}")
    p = lines.let(f"arith.addf {p}, {constant(1.0)} : {kind}")
    i = lines.let(f"arith.fptosi {n} : {kind} to {whole}")
    bias = lines.let(f"arith.constant dense<127> : {whole}")
    shift = lines.let(f"arith.constant dense<23> : {whole}")
    bits = lines.let(f"arith.shli {lines.let(f'arith.addi {i}, {bias} : {whole}')}, {shift} : {whole}")
    scale = lines.let(f"arith.bitcast {bits} : {whole} to {kind}")
    result = lines.let(f"arith.mulf {p}, {scale} : {kind}")
    return f"func.func private @exp(%x: {kind}) -> {kind} {{\n{lines.text()}\nreturn {result} : {kind}\n}}"


THREADS = """func.func private @omp_get_thread_num() -> i32
func.func private @omp_get_num_threads() -> i32
func.func private @GOMP_barrier()
func.func private @thread() -> (index, index) {
  %id = call @omp_get_thread_num() : () -> i32
  %of = call @omp_get_num_threads() : () -> i32
  %thread = arith.index_cast %id : i32 to index
  %threads = arith.index_cast %of : i32 to index
  return %thread, %threads : index, index
}
func.func private @share(%count: index, %unit: index, %thread: index, %threads: index) -> (index, index) {
  %units = arith.ceildivui %count, %unit : index
  %each = arith.ceildivui %units, %threads : index
  %first = arith.muli %each, %thread : index
  %last = arith.addi %first, %each : index
  %begin = arith.muli %first, %unit : index
  %end = arith.muli %last, %unit : index
  %b = arith.minui %begin, %count : index
  %e = arith.minui %end, %count : index
  return %b, %e : index, index
}"""
