"""Rotation of heads by a Hadamard matrix: outliers of one channel are spread over all (QuIP#, QuaRot, 2024)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def rotate(x: Tensor) -> Tensor:
    """x [..., dim] H / sqrt(dim), rounded once to the type of x. Twice is once back: H is symmetric.

    Raises ValueError where dim is not a power of two.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    return (x.to(exact) @ matrix(x.shape[-1], exact, x.device)).to(x.dtype)


@functools.lru_cache(maxsize=64)
def matrix(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The normalized Hadamard matrix (Sylvester): symmetric, and its own inverse."""
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"a Hadamard rotation needs a head width that is a power of two, not {dim}")
    made = torch.ones(1, 1, dtype=torch.float64)
    while made.shape[0] < dim:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return (made * dim**-0.5).to(dtype=dtype, device=device)
