"""Rotary position embedding (Su et al., 2021), in the half-rotated layout of Hugging Face's Llama."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.operators import Lowered, define_operator


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = exact.chunk(2, dim=-1)
    cos, sin = (rearrange(part, "token half -> token 1 half") for part in (cos, sin))
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


ROTARY = define_operator(
    "rotary",
    "(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    lambda x, cos, sin: torch.empty_like(x, memory_format=torch.contiguous_format),
    {Backend.TRITON: "compiled_kernels.rotary.triton:rotary", Backend.MLIR: Lowered(rotary_reference)},
)


def rotary(
    x: Float[Tensor, "token head dim"],
    cos: Float[Tensor, "token half"],
    sin: Float[Tensor, "token half"],
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token head dim"]:
    """Rotate each pair (x[i], x[i + dim/2]) by its token's angle i, in float32; the type of `x` is kept."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return rotary_reference(x, cos, sin)
    return ROTARY.implementation(backend)(x, cos, sin)
