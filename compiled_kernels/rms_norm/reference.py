from __future__ import annotations

import torch
from einops import reduce
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = reduce(exact.square(), "token width -> token 1", "mean")
    return (exact * torch.rsqrt(mean_square + eps) * weight.to(exact.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = (x + residual).to(x.dtype)
    return total, rms_norm(total, weight, eps)
