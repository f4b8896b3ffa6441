"""Multiply activations by a weight matrix, for few rows (decode) and many rows (prefill)."""

from __future__ import annotations

import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Shaped
from torch import Tensor

from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.blocked.layout import PANEL, from_panels, in_panels
from compiled_kernels.linear import by_blocks
from compiled_kernels.linear import inductor as traced
from compiled_kernels.linear.int8_activations import int8_problem, multiply_int8
from compiled_kernels.linear.matrix_format import WORDS, MatrixFormat
from compiled_kernels.operators import define_operator


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = einsum(x, weight, "token width, out width -> token out")
    return out if bias is None else out + bias


def _fake(x: Tensor, weight: Tensor, *_: Tensor | int | str | None) -> Tensor:
    return x.new_empty(x.shape[0], len(weight) * (PANEL if in_panels(weight) else 1))


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
LINEAR_QUANTIZED = define_operator(
    "linear_quantized",
    "(Tensor x, Tensor weight, Tensor scales, Tensor? minima, Tensor? bias, str codes, int group, str activations)"
    " -> Tensor",
    _fake,
    {
        Backend.INDUCTOR: "compiled_kernels.linear.api:dequantized_by_blocks",
        Backend.TRITON: "compiled_kernels.linear.triton:linear_quantized",
        Backend.MLIR: "compiled_kernels.linear.mlir:linear_quantized",
    },
)


def linear(
    x: Float[Tensor, "token width"],
    weight: Float[Tensor, "out width"] | Float[Tensor, "panel row column value"],
    bias: Tensor | None = None,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Compute x @ weight.T + bias, in the type of `x`; a float16 weight is accepted with any type of x. The backend
    triton calls the vendor's matrix product.

    Here and below a weight may be in panels (see blocked/layout.py), which the backend mlir reads directly; any other
    backend converts it to the plain weight at each call.
    """
    weight = weight if backend is Backend.MLIR else from_panels(weight)
    if backend in (Backend.TRITON, Backend.MLIR):
        return LINEAR.implementation(backend)(x, weight, bias)
    if backend is Backend.INDUCTOR and traced.reduces(x):
        return traced.linear(x, weight, None, bias)
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return (by_blocks.linear if backend is Backend.EAGER else LINEAR.implementation(backend))(x, weight, bias)


def linear_quantized(
    x: Float[Tensor, "token width"],
    weight: Shaped[Tensor, "out stored"] | Shaped[Tensor, "panel row column value"],
    scales: Shaped[Tensor, "..."],
    minima: Shaped[Tensor, "..."] | None = None,
    bias: Tensor | None = None,
    codes: str = "int8",
    group: int = 0,
    activations: str = "float",
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Compute x @ matrix.T + bias, in the type of `x`, with a quantized matrix (see `MatrixFormat`).

    Args:
        x: the rows.
        weight: the matrix's codes, row by row or in panels.
        scales: float32 [out]; for groups of columns float16, bfloat16 or float32 [out, group], or exponents in uint8.
        minima: [out, group], any of these types; None if the format has no minima.
        bias: [out].
        codes: kind of codes: `MatrixFormat.codes`.
        group: columns that share a scale (the last group may have fewer); 0: a whole row. Words have their own groups.
        activations: `float`; or `int8`: x is rounded to INT8 (see linear/int8_activations.py), row by row if the weight
            has one scale per row, else by blocks of 32 columns.
        backend: the backend.

    Raises:
        BackendError: the backend does not support this format; with `int8`, the codes are no integers, or a group or
            row has an unsupported width.
    """
    if in_panels(scales) and codes not in WORDS:  # for groups that divide the width
        group = x.shape[1] // scales.shape[1]
    if activations == "int8" and (problem := int8_problem(codes, group, x.shape[1])):
        raise BackendError(f"linear_quantized: {problem}")
    if backend is not Backend.MLIR:
        weight, scales = from_panels(weight), from_panels(scales)
        minima = None if minima is None else from_panels(minima)
    if backend is Backend.INDUCTOR and activations == "float" and codes not in WORDS and traced.reduces(x):
        group = group or (x.shape[1] if codes == "fp8" else 0)
        if group:
            return traced.linear_grouped(x, weight, scales.view(len(weight), -1), minima, bias, group)
        return traced.linear(x, weight, scales, bias)
    run = dequantized_by_blocks if backend is Backend.EAGER else LINEAR_QUANTIZED.implementation(backend)
    return run(x, weight, scales, minima, bias, codes, group, activations)


def dequantized_by_blocks(
    x: Tensor, weight: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, codes: str, group: int,
    activations: str,
) -> Tensor:  # fmt: skip
    run = multiply_int8 if activations == "int8" else by_blocks.linear_stored
    return run(x, MatrixFormat.of(codes, group, scales, minima), (weight, scales, minima), bias)
