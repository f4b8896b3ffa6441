"""Products for torch.compile: one row as a multiply-reduce, which reads each weight once at the memory's pace where a
library's matrix product reaches about half of it; more rows as a matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels.linear.quantize import dequantize_int4, dequantize_int8


def reduces(x: Tensor) -> bool:
    """Return whether a product with `x` is better written as a multiply-reduce."""
    return x.shape[0] == 1 and x.device.type == "cpu"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    exact = torch.promote_types(x.dtype, torch.float32)
    return _with_bias((weight.to(exact) * x.to(exact)).sum(dim=-1)[None], bias, x.dtype)


def linear_int8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    if not reduces(x):
        return F.linear(x, dequantize_int8(values, scales).to(x.dtype), bias)
    exact = torch.promote_types(x.dtype, torch.float32)
    return _with_bias(((values.to(exact) * x.to(exact)).sum(dim=-1) * scales)[None], bias, x.dtype)


def linear_int4(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    if not reduces(x):
        return F.linear(x, dequantize_int4(packed, scales).to(x.dtype), bias)
    exact = torch.promote_types(x.dtype, torch.float32)
    groups = scales.shape[1]
    halves = packed.view(packed.shape[0], groups, -1)
    low, high = x.to(exact).view(1, groups, 2, -1).unbind(dim=2)
    sums = ((halves & 15).to(exact) - 8) * low + ((halves >> 4).to(exact) - 8) * high
    return _with_bias((sums * scales.to(exact)[..., None]).sum(dim=(1, 2))[None], bias, x.dtype)


def _with_bias(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (out if bias is None else out + bias.to(out.dtype)).to(dtype)
