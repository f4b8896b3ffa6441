"""The gate through torch-mlir: the specification itself, its exponential a polynomial (see mlir/rewrites.py)."""

from __future__ import annotations

from torch import Tensor

from compiled_kernels.gated.reference import reference
from compiled_kernels.mlir.leaf import Leaf

GATED_SILU = Leaf("gated_silu", reference, lanes=64)


def gated_silu(gate_up: Tensor) -> Tensor:
    return GATED_SILU.prepare((gate_up,))(gate_up)
