"""The gates through torch-mlir: the specifications themselves, exponentials as polynomials (see mlir/rewrites.py)."""

from __future__ import annotations

from torch import Tensor

from compiled_kernels.gated import reference
from compiled_kernels.mlir.leaf import LeafOperator

GATED_SILU = LeafOperator("gated_silu", reference.reference, lanes=64)
GATED_GELU = LeafOperator("gated_gelu", reference.gelu, lanes=64)
GATED_CLAMPED = LeafOperator("gated_clamped", reference.clamped, lanes=64)


def gated_silu(gate_up: Tensor) -> Tensor:
    return GATED_SILU.prepare((gate_up,))(gate_up)


def gated_gelu(gate_up: Tensor) -> Tensor:
    return GATED_GELU.prepare((gate_up,))(gate_up)


def gated_clamped(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    return GATED_CLAMPED.prepare((gate_up,), alpha, limit)(gate_up)
