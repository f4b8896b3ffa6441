"""Rotary position embedding (Su et al., 2021), in the half-rotated layout of Hugging Face's Llama."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.operators import Lowered, define_operator
from compiled_kernels.rotary.reference import reference

ROTARY = define_operator(
    "rotary",
    "(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    lambda x, cos, sin: torch.empty_like(x, memory_format=torch.contiguous_format),
    {Backend.TRITON: "compiled_kernels.rotary.triton:rotary", Backend.MLIR: Lowered(reference)},
)


def rotary(
    x: Float[Tensor, "token head dim"],
    cos: Float[Tensor, "token half"],
    sin: Float[Tensor, "token half"],
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token head dim"]:
    """Rotate each pair (x[i], x[i + dim/2]) by its token's angle i, in float32; the type of `x` is kept."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return reference(x, cos, sin)
    return ROTARY.implementation(backend)(x, cos, sin)
