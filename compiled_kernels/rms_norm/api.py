"""Root-mean-square normalization (Zhang and Sennrich, 2019), alone or after a residual addition."""

from __future__ import annotations

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.operators import Lowered, define_operator


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = reduce(exact.square(), "token width -> token 1", "mean")
    return (exact * torch.rsqrt(mean_square + eps) * weight.to(exact.dtype)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = (x + residual).to(x.dtype)
    return total, rms_norm_reference(total, weight, eps)


RMS_NORM = define_operator(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    lambda x, weight, eps: torch.empty_like(x, memory_format=torch.contiguous_format),
    {
        Backend.TRITON: "compiled_kernels.rms_norm.triton:rms_norm",
        Backend.MLIR: Lowered(rms_norm_reference, lanes=64),
    },
)
ADD_RMS_NORM = define_operator(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, *_: tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)),
    {
        Backend.TRITON: "compiled_kernels.rms_norm.triton:add_rms_norm",
        Backend.MLIR: Lowered(add_rms_norm_reference, lanes=64),
    },
)


def rms_norm(
    x: Float[Tensor, "token width"], weight: Float[Tensor, " width"], eps: float, backend: Backend = Backend.EAGER
) -> Float[Tensor, "token width"]:
    """Compute x / sqrt(mean(x²) + eps) * weight over the last axis, in float32; the result has the type of `x`."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):  # traced, the specification is one fused kernel
        return rms_norm_reference(x, weight, eps)
    return RMS_NORM.implementation(backend)(x, weight, eps)


def add_rms_norm(
    x: Float[Tensor, "token width"],
    residual: Float[Tensor, "token width"],
    weight: Float[Tensor, " width"],
    eps: float,
    backend: Backend = Backend.EAGER,
) -> tuple[Tensor, Tensor]:
    """Compute x + residual, rounded to the type of `x`, and its norm: both [token, hidden]. Raises BackendError if `x`
    and `residual` differ in shape."""
    if x.shape != residual.shape:
        raise BackendError(f"add_rms_norm: x {list(x.shape)} and residual {list(residual.shape)} must have one shape")
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return add_rms_norm_reference(x, residual, weight, eps)
    return ADD_RMS_NORM.implementation(backend)(x, residual, weight, eps)
