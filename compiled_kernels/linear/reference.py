from __future__ import annotations

from einops import einsum
from torch import Tensor

from compiled_kernels.linear.quantize import dequantize_int4, dequantize_int8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = einsum(x, weight, "token width, out width -> token out")
    return out if bias is None else out + bias


def linear_int8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, dequantize_int8(values, scales).to(x.dtype), bias)


def linear_int4(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, dequantize_int4(packed, scales).to(x.dtype), bias)
