"""Words that hand-written kernels share: types, arguments, and the level that they are written for.

A kernel is a function of the func, scf, arith, memref and vector dialects on static memrefs, written for a level of the
instruction set (`Target`): vectors are as long as its registers, and no more sums are carried than fit them. Where the
level has an instruction that no dialect names (bfloat16 dot products, table look-ups), it is called as an LLVM
intrinsic; without it the same function is written in plain vector arithmetic.
"""

from compiled_kernels.mlir_text.functions import Named, indices
from compiled_kernels.mlir_text.target import MLIR_TYPES, SIZE_BOUND, Target, largest_divisor, memref

__all__ = ["MLIR_TYPES", "SIZE_BOUND", "Named", "Target", "indices", "largest_divisor", "memref"]
