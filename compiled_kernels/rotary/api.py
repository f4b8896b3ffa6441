"""Rotary position embedding (Su et al., 2021), in the half-rotated layout of Hugging Face's Llama."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.lanes import Lane
from compiled_kernels.operators import define
from compiled_kernels.rotary.reference import reference

ROTARY = define(
    "rotary",
    "(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    lambda x, cos, sin: torch.empty_like(x, memory_format=torch.contiguous_format),
    {Lane.TRITON: "compiled_kernels.rotary.triton:rotary", Lane.MLIR: "compiled_kernels.rotary.mlir:rotary"},
)


def rotary(
    x: Float[Tensor, "token head dim"],
    cos: Float[Tensor, "token half"],
    sin: Float[Tensor, "token half"],
    lane: Lane = Lane.EAGER,
) -> Float[Tensor, "token head dim"]:
    """Rotate each pair (x[i], x[i + dim/2]) by its token's angle i, in float32; the type of `x` is kept."""
    if lane in (Lane.EAGER, Lane.INDUCTOR):
        return reference(x, cos, sin)
    return ROTARY.form(lane)(x, cos, sin)
