"""Multiply matrices on tensor cores, with a replacement for Triton's interpreter. Kernels use tensor cores only
here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_kernels.backends import triton_interpreted

# Triton's interpreter keeps bfloat16 as its bits: it multiplies them, and converts integers to them, as if they were
# integers, and cuts float32 to them where a GPU rounds (tests hold it to that). In float32 it is right.
UPCAST = tl.constexpr(triton_interpreted())


@triton.jit
def operand(numbers, dtype: tl.constexpr):
    """Convert numbers that were made in registers to `dtype`, as an operand of `dot`; the interpreter keeps them in
    float32.
    """
    return numbers.to(tl.float32 if UPCAST else dtype)


@triton.jit
def dot(a, b, sums):
    """Return sums + a @ b in float32; float32 operands are multiplied in full precision, not as TF32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")
