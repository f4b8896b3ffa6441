from __future__ import annotations

import torch
from einops import einsum
from torch import Tensor

from compiled_kernels.linear_w8a8.quantize import quantize_rows


def linear_w8a8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Float64 holds every sum of products of INT8 exactly, in whatever order it is added up."""
    rows, row_scales = quantize_rows(x)
    sums = einsum(rows.double(), values.double(), "token width, out width -> token out").to(torch.int64)
    out = sums.to(row_scales.dtype) * row_scales[:, None] * scales.to(row_scales.dtype)
    return (out if bias is None else out + bias.to(out.dtype)).to(x.dtype)
