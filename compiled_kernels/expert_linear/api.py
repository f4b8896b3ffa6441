"""Multiply each row with the weight matrix of its expert (mixture of experts, Shazeer et al., 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.blocked.layout import in_panels, shape_of
from compiled_kernels.expert_linear.stacks import of_expert, stack_format
from compiled_kernels.linear.by_blocks import linear_stored
from compiled_kernels.operators import define_operator

MAX_TRACED_ROWS = 8  # rows; a matrix shared by several rows is read once per row
TRACED = ("dense", "int8")  # codes that a graph reads directly
EXPERT_LINEAR = define_operator(
    "expert_linear",
    "(Tensor x, Tensor expert, Tensor weight, Tensor? bias, Tensor? scales, Tensor? minima, str codes) -> Tensor",
    lambda x, expert, weight, *_: x.new_empty(x.shape[0], shape_of(weight)[0]),
    {
        Backend.INDUCTOR: "compiled_kernels.expert_linear.api:expert_linear_reference",
        Backend.MLIR: "compiled_kernels.expert_linear.mlir:expert_linear",
        Backend.TRITON: "compiled_kernels.expert_linear.triton:expert_linear",
    },
)


def expert_linear_reference(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, minima: Tensor | None,
    codes: str,
) -> Tensor:  # fmt: skip
    format = stack_format(codes, x.shape[1], scales, minima)
    out = x.new_empty(x.shape[0], shape_of(weight)[0])
    for number in torch.unique(expert).tolist():
        rows = (expert == number).nonzero()[:, 0]
        matrix = of_expert((weight, scales, minima), number)
        shift = None if bias is None else bias[number]
        if format.is_dense:
            out[rows] = F.linear(x[rows], matrix[0].to(x.dtype), shift)
        else:
            out[rows] = linear_stored(x[rows], format, matrix, shift)
    return out


def expert_linear(
    x: Float[Tensor, "row width"],
    expert: Int[Tensor, " row"],
    weight: Shaped[Tensor, "expert out stored"] | Shaped[Tensor, "e panel step 32 v"],
    bias: Float[Tensor, "expert out"] | None = None,
    scales: Shaped[Tensor, "..."] | None = None,
    minima: Shaped[Tensor, "..."] | None = None,
    codes: str = "dense",
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "row out"]:
    """Compute x[r] @ weight[expert[r]].T + bias[expert[r]], in the type of `x`. Only experts named in `expert` are
    read.

    Args:
        x: rows, one for each (token, chosen expert) pair.
        expert: the expert of each row.
        weight: the matrices of all experts, row by row or in panels (see blocked/layout.py). The backend mlir reads
            panels in place; other backends convert the named experts to plain matrices at each call.
        bias: the experts' biases.
        scales: scales of quantized matrices, for each expert in the format of a single matrix.
        minima: minima in the same format; None if the matrices have none.
        codes: format of the matrices: `MatrixFormat.codes`. Eager and inductor dequantize a named expert some rows at a
            time; the other backends dequantize in registers.
        backend: the backend.
    """
    if backend is Backend.EAGER:
        return expert_linear_reference(x, expert, weight, bias, scales, minima, codes)
    # A graph cannot read which experts are named: within a graph, products of many rows are opaque.
    if (
        backend is Backend.INDUCTOR
        and torch.compiler.is_compiling()
        and x.shape[0] <= MAX_TRACED_ROWS
        and x.device.type == "cpu"
        and codes in TRACED
        and minima is None
        and not in_panels(weight)
    ):
        return traced(x, expert, weight, bias, scales)
    return EXPERT_LINEAR.implementation(backend)(x, expert, weight, bias, scales, minima, codes)


def traced(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> Tensor:
    """Multiply a few rows by their experts' matrices inside a torch.compile graph: the products are written as sums
    over columns, so that each matrix is read in place.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    products = weight[expert].to(exact) * x.to(exact)[:, None]
    if scales is not None and scales.ndim > 2:
        groups = products.unflatten(-1, (scales.shape[-1], -1))
        out = (groups * scales[expert].to(exact)[..., None]).sum(dim=(-1, -2))
    else:
        out = products.sum(dim=-1)
        out = out if scales is None else out * scales[expert].to(exact)
    return (out if bias is None else out + bias[expert].to(exact)).to(x.dtype)
