"""A product with a weight matrix, for few rows (decode) and many (prefill)."""

from __future__ import annotations

import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.blocked.layout import from_panels, shape_of
from compiled_kernels.linear import by_blocks
from compiled_kernels.linear import inductor as traced
from compiled_kernels.operators import define_operator


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = einsum(x, weight, "token width, out width -> token out")
    return out if bias is None else out + bias


def _fake(x: Tensor, weight: Tensor, *_: Tensor | int | None) -> Tensor:
    return x.new_empty(x.shape[0], shape_of(weight)[0])


LINEAR = define_operator(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _fake,
    {
        Backend.INDUCTOR: "compiled_kernels.linear.by_blocks:linear",
        Backend.TRITON: "compiled_kernels.linear.triton:linear",
        Backend.MLIR: "compiled_kernels.linear.mlir:linear",
    },
)
LINEAR_INT8 = define_operator(
    "linear_int8",
    "(Tensor x, Tensor values, Tensor scales, Tensor? bias) -> Tensor",
    _fake,
    {
        Backend.INDUCTOR: "compiled_kernels.linear.by_blocks:linear_int8",
        Backend.TRITON: "compiled_kernels.linear.triton:linear_int8",
        Backend.MLIR: "compiled_kernels.linear.mlir:linear_int8",
    },
)
LINEAR_GROUPED = define_operator(
    "linear_grouped",
    "(Tensor x, Tensor codes, Tensor scales, Tensor? minima, Tensor? bias, int group) -> Tensor",
    _fake,
    {
        Backend.INDUCTOR: "compiled_kernels.linear.by_blocks:linear_grouped",
        Backend.TRITON: "compiled_kernels.linear.triton:linear_grouped",
        Backend.MLIR: "compiled_kernels.linear.mlir:linear_grouped",
    },
)
LINEAR_QUANTIZED = define_operator(
    "linear_quantized",
    "(Tensor x, Tensor weight, Tensor scales, Tensor? minima, Tensor? bias, str format) -> Tensor",
    _fake,
    {
        Backend.INDUCTOR: "compiled_kernels.linear.by_blocks:linear_quantized",
        Backend.MLIR: "compiled_kernels.linear.mlir:linear_quantized",
        Backend.TRITON: "compiled_kernels.linear.triton:linear_quantized",
    },
)


def linear(
    x: Float[Tensor, "token width"],
    weight: Float[Tensor, "out width"] | Float[Tensor, "panel row column value"],
    bias: Tensor | None = None,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Compute x @ weight.T + bias, in the type of `x`; a weight may be float16 beside any. On the backend triton this
    is the vendor's matrix product.

    Here and below a weight may be in panels (see blocked/layout.py), which the backend mlir reads in place; on any
    other backend the plain weight is made of it at each call.
    """
    weight = weight if backend is Backend.MLIR else from_panels(weight)
    if backend in (Backend.TRITON, Backend.MLIR):
        return LINEAR.implementation(backend)(x, weight, bias)
    if backend is Backend.INDUCTOR and traced.reduces(x):
        return traced.linear(x, weight, bias)
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return (by_blocks.linear if backend is Backend.EAGER else LINEAR.implementation(backend))(x, weight, bias)


def linear_int8(
    x: Float[Tensor, "token width"],
    values: Int8[Tensor, "out width"] | Int8[Tensor, "panel row column value"],
    scales: Float[Tensor, " out"],
    bias: Tensor | None = None,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Compute x @ (values * scales).T + bias, one scale an output channel, in the type of `x`."""
    values = values if backend is Backend.MLIR else from_panels(values)
    if backend is Backend.INDUCTOR and traced.reduces(x):
        return traced.linear_int8(x, values, scales, bias)
    run = by_blocks.linear_int8 if backend is Backend.EAGER else LINEAR_INT8.implementation(backend)
    return run(x, values, scales, bias)


def linear_grouped(
    x: Float[Tensor, "token width"],
    codes: Tensor,
    scales: Float[Tensor, "out column_group"],
    minima: Float[Tensor, "out column_group"] | None,
    bias: Tensor | None,
    group: int,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Compute x @ (codes * scales + minima).T + bias, in the type of `x`.

    Args:
        x: the rows.
        codes: int8 or float8_e4m3fn (without NaN) [out, width]; or int32 [out, width / 8], words of 4-bit codes (see
            linear/planes.py): -8..7 as code + 8, beside minima 0..15.
        scales: float16, bfloat16 or float32.
        minima: of any of these types; not beside float8_e4m3fn.
        bias: [out].
        group: columns that share a scale and a minimum; the last group may have fewer; of 4-bit codes
            they are multiples of 8, and whole.
        backend: what computes it.
    """
    if backend is Backend.INDUCTOR and traced.reduces(x):
        return traced.linear_grouped(x, codes, scales, minima, bias, group)
    run = by_blocks.linear_grouped if backend is Backend.EAGER else LINEAR_GROUPED.implementation(backend)
    return run(x, codes, scales, minima, bias, group)


def linear_quantized(
    x: Float[Tensor, "token width"],
    weight: Int32[Tensor, "out word"] | Int32[Tensor, "panel word column value"],
    scales: Float[Tensor, "out column_group"],
    minima: Float[Tensor, "out column_group"] | None,
    bias: Tensor | None,
    format: str,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Compute x @ weight.T + bias, in the type of `x`, of a matrix in words.

    Args:
        x: the rows.
        weight: words of the matrix (see linear/planes.py), row by row or in panels.
        scales: float16, or exponents in uint8.
        minima: float16; None where the format has none.
        bias: [out].
        format: the name of a format of `matrix_format.WORDS`: "q4_k", ...
        backend: what computes it.
    """
    weight = weight if backend is Backend.MLIR else from_panels(weight)
    run = by_blocks.linear_quantized if backend is Backend.EAGER else LINEAR_QUANTIZED.implementation(backend)
    return run(x, weight, scales, minima, bias, format)
