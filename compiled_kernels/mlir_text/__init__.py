"""Pieces of MLIR text that the hand-written kernels share: vector widths, conversions, sums, exp, threads.

A kernel is a function of the func, scf, arith, memref and vector dialects on static memrefs. Where a processor has an
instruction that no dialect names (bfloat16 dot products, table look-ups) and `Target` says so, it is called as an
LLVM intrinsic; without it the same function is written in plain vector arithmetic.
"""

from compiled_kernels.mlir_text.functions import THREADS, Named, call, declared, exp_function, share_of
from compiled_kernels.mlir_text.lines import Lines
from compiled_kernels.mlir_text.target import PAGES, SUMS, TYPES, Target, divisor, memref, number, vector

__all__ = [
    "PAGES",
    "SUMS",
    "THREADS",
    "TYPES",
    "Lines",
    "Named",
    "Target",
    "call",
    "declared",
    "divisor",
    "exp_function",
    "memref",
    "number",
    "share_of",
    "vector",
]
