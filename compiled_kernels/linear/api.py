"""A product with a weight matrix, for few rows (decode) and many (prefill)."""

from __future__ import annotations

import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.blocked.layout import from_panels, shape_of
from compiled_kernels.linear import inductor as traced
from compiled_kernels.linear.quantize import dequantize_int4, dequantize_int8
from compiled_kernels.operators import define_operator


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = einsum(x, weight, "token width, out width -> token out")
    return out if bias is None else out + bias


def linear_int8_reference(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return linear_reference(x, dequantize_int8(values, scales).to(x.dtype), bias)


def linear_int4_reference(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return linear_reference(x, dequantize_int4(packed, scales).to(x.dtype), bias)


def _fake(x: Tensor, weight: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], shape_of(weight)[0])


LINEAR = define_operator(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _fake,
    {Backend.TRITON: "compiled_kernels.linear.triton:linear", Backend.MLIR: "compiled_kernels.linear.mlir:linear"},
)
LINEAR_INT8 = define_operator(
    "linear_int8",
    "(Tensor x, Tensor values, Tensor scales, Tensor? bias) -> Tensor",
    _fake,
    {
        Backend.TRITON: "compiled_kernels.linear.triton:linear_int8",
        Backend.MLIR: "compiled_kernels.linear.mlir:linear_int8",
    },
)
LINEAR_INT4 = define_operator(
    "linear_int4",
    "(Tensor x, Tensor packed, Tensor scales, Tensor? bias) -> Tensor",
    _fake,
    {
        Backend.TRITON: "compiled_kernels.linear.triton:linear_int4",
        Backend.MLIR: "compiled_kernels.linear.mlir:linear_int4",
    },
)


def linear(
    x: Float[Tensor, "token width"],
    weight: Float[Tensor, "out width"] | Float[Tensor, "panel row column value"],
    bias: Tensor | None = None,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Compute x @ weight.T + bias, in the type of `x`. On the backend triton this is the vendor's matrix product.

    Here and below a weight may be in panels (see blocked/layout.py), which the backend mlir reads in place; on any
    other backend the plain weight is made of it at each call.
    """
    weight = weight if backend is Backend.MLIR else from_panels(weight)
    if backend in (Backend.TRITON, Backend.MLIR):
        return LINEAR.implementation(backend)(x, weight, bias)
    if backend is Backend.INDUCTOR and traced.reduces(x):
        return traced.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_int8(
    x: Float[Tensor, "token width"],
    values: Int8[Tensor, "out width"] | Int8[Tensor, "panel row column value"],
    scales: Float[Tensor, " out"],
    bias: Tensor | None = None,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Compute x @ (values * scales).T + bias, one scale an output channel, in the type of `x`."""
    values = values if backend is Backend.MLIR else from_panels(values)
    if backend is Backend.EAGER:
        return linear_int8_reference(x, values, scales, bias)
    if backend is Backend.INDUCTOR:
        return traced.linear_int8(x, values, scales, bias)
    return LINEAR_INT8.implementation(backend)(x, values, scales, bias)


def linear_int4(
    x: Float[Tensor, "token width"],
    packed: UInt8[Tensor, "out half"],
    scales: Float[Tensor, "out column_group"],
    bias: Tensor | None = None,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Compute x @ (values * scales).T + bias, one scale for each group of columns; `packed` as in `quantize_int4`."""
    if backend is Backend.EAGER:
        return linear_int4_reference(x, packed, scales, bias)
    if backend is Backend.INDUCTOR:
        return traced.linear_int4(x, packed, scales, bias)
    return LINEAR_INT4.implementation(backend)(x, packed, scales, bias)
