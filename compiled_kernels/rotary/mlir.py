"""Rotary embedding through torch-mlir. Heads are read where a fused projection left them."""

from __future__ import annotations

from torch import Tensor

from compiled_kernels.mlir.leaf import LeafOperator
from compiled_kernels.rotary.reference import reference

ROTARY = LeafOperator("rotary", reference)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ROTARY.prepare((x, cos, sin))(x, cos, sin)
