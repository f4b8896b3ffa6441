"""The one place where a matrix product is asked of the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_kernels.lanes import interpreted

# Triton's interpreter multiplies the bits of bfloat16 as if they were integers (see the test of it); wider is right.
UPCAST = tl.constexpr(interpreted())


@triton.jit
def dot(a, b, sums):
    """sums + a @ b in float32; float32 operands are multiplied as such, not as TF32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")
