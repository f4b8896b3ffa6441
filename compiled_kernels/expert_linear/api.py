"""Products of rows with one of several weight matrices each (mixture of experts, Shazeer et al., 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.blocked.layout import in_panels, shape_of
from compiled_kernels.expert_linear.packed import e2m1_values, expert_matrix, exponents, stack_kind
from compiled_kernels.operators import define_operator

MAX_TRACED_ROWS = 8  # rows; a matrix that several rows name is read for each of them
EXPERT_LINEAR = define_operator(
    "expert_linear",
    "(Tensor x, Tensor expert, Tensor weight, Tensor? bias, Tensor? scales) -> Tensor",
    lambda x, expert, weight, bias, scales: x.new_empty(x.shape[0], shape_of(weight)[0]),
    {
        Backend.INDUCTOR: "compiled_kernels.expert_linear.api:expert_linear_reference",
        Backend.MLIR: "compiled_kernels.expert_linear.mlir:expert_linear",
        Backend.TRITON: "compiled_kernels.expert_linear.triton:expert_linear",
    },
)


def expert_linear_reference(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None
) -> Tensor:
    out = x.new_empty(x.shape[0], shape_of(weight)[0])
    for number in torch.unique(expert).tolist():
        rows = (expert == number).nonzero()[:, 0]
        matrix = expert_matrix(weight, scales, number).to(x.dtype)
        out[rows] = F.linear(x[rows], matrix, None if bias is None else bias[number])
    return out


def expert_linear(
    x: Float[Tensor, "row width"],
    expert: Int[Tensor, " row"],
    weight: Float[Tensor, "expert out width"] | Int[Tensor, "expert out stored"] | Shaped[Tensor, "e panel step 32 v"],
    bias: Float[Tensor, "expert out"] | None = None,
    scales: Shaped[Tensor, "..."] | None = None,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "row out"]:
    """Compute x[r] @ weight[expert[r]].T + bias[expert[r]], in the type of `x`. Only the experts that are named are
    read.

    Args:
        x: rows, one for each (token, chosen expert) pair.
        expert: the expert of each row.
        weight: the matrices of all experts, row by row or in panels (see blocked/layout.py), which the backend mlir
            reads in place; elsewhere those that are named are made plain at each call.
        bias: their biases.
        scales: with codes in place of numbers, their scales (see packed.py). Eager and mlir row by row widen the
            experts that are named at each call; mlir from panels, triton and graphs of few rows widen in registers.
        backend: the backend.
    """
    if backend is Backend.EAGER:
        return expert_linear_reference(x, expert, weight, bias, scales)
    # Which experts are named no graph can read: inside one, products of many rows are opaque.
    if (
        backend is Backend.INDUCTOR
        and torch.compiler.is_compiling()
        and x.shape[0] <= MAX_TRACED_ROWS
        and x.device.type == "cpu"
        and not in_panels(weight)
    ):
        return traced(x, expert, weight, bias, scales)
    return EXPERT_LINEAR.implementation(backend)(x, expert, weight, bias, scales)


def traced(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> Tensor:
    """Multiply few rows in a graph: each matrix is read in place, inside the sum over its columns."""
    exact = torch.promote_types(x.dtype, torch.float32)
    wide, matrices = x.to(exact)[:, None], weight[expert]
    if scales is None or scales.ndim == 2:
        out = (matrices.to(exact) * wide).sum(dim=-1)
        out = out if scales is None else out * scales[expert].to(exact)
    else:
        out = _of_groups(wide, matrices, scales[expert], stack_kind(weight, scales))
    return (out if bias is None else out + bias[expert].to(exact)).to(x.dtype)


def _of_groups(x: Tensor, codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Sum x [row, 1, width] times codes [row, out, stored]: each group's products, times its scale."""
    exact, groups = x.dtype, scales.shape[-1]
    codes, columns = (each.unflatten(-1, (groups, -1)) for each in (codes, x))
    if kind == "int8":
        sums = codes.to(exact) * columns
    else:
        low, high = columns.unflatten(-1, (-1, 2)).unbind(-1)
        sums = _values(codes & 15, kind, exact) * low + _values(codes >> 4, kind, exact) * high
    wide = exponents(scales) if kind == "mxfp4" else scales
    return (sums * wide.to(exact)[..., None]).sum(dim=(-1, -2))


def _values(codes: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) - 8 if kind == "int4" else e2m1_values(codes, dtype)
