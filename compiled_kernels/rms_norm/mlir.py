"""The norms through torch-mlir: the specification itself, lowered for one shape at a time (see mlir/leaf.py)."""

from __future__ import annotations

from torch import Tensor

from compiled_kernels.mlir.leaf import LeafOperator
from compiled_kernels.rms_norm import reference

RMS_NORM = LeafOperator("rms_norm", reference.rms_norm, lanes=64)
ADD_RMS_NORM = LeafOperator("add_rms_norm", reference.add_rms_norm, lanes=64)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return RMS_NORM.prepare((x, weight), eps)(x, weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return ADD_RMS_NORM.prepare((x, residual, weight), eps)(x, residual, weight)
