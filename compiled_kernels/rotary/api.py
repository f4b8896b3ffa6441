"""Rotary position embedding (Su et al., 2021), in the half-rotated layout of Hugging Face's Llama."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from compiled_kernels.rotary.reference import reference


def rotary(
    x: Float[Tensor, "token head dim"], cos: Float[Tensor, "token half"], sin: Float[Tensor, "token half"]
) -> Tensor:
    """Turn each pair (x[i], x[i + dim/2]) by its token's angle i, in float32; the type of `x` is kept."""
    return reference(x, cos, sin)
