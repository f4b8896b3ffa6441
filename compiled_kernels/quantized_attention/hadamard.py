"""Rotation of heads by a Hadamard matrix: outliers of one channel are spread over all (QuIP#, QuaRot, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_rotate(x: Tensor) -> Tensor:
    """Rotate x [..., dim] by H / sqrt(dim), rounded once to the type of x; H is Sylvester's, so that twice is once
    back.

    By butterflies (the fast Walsh-Hadamard transform) in float64, not a product of matrices: a product's bits depend
    on how many rows it has, and a bit decides a code that lies between two. ValueError where dim is no power of two.
    """
    dim = x.shape[-1]
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"a Hadamard rotation needs a head width that is a power of two, not {dim}")
    turned, half = x.double(), 1
    while half < dim:
        above, below = turned.unflatten(-1, (dim // (2 * half), 2, half)).unbind(-2)
        turned = torch.stack([above + below, above - below], dim=-2).flatten(-3)
        half *= 2
    return (turned * dim**-0.5).to(x.dtype)
