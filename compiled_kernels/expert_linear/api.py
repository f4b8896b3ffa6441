"""Products of rows with one of several weight matrices each (mixture of experts, Shazeer et al., 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.blocked.layout import from_panels, in_panels, shape_of
from compiled_kernels.operators import define_operator

MAX_TRACED_ROWS = 8  # rows; a matrix that several rows name is read for each of them
EXPERT_LINEAR = define_operator(
    "expert_linear",
    "(Tensor x, Tensor expert, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, expert, weight, bias: x.new_empty(x.shape[0], shape_of(weight)[0]),
    {
        Backend.INDUCTOR: "compiled_kernels.expert_linear.api:expert_linear_reference",
        Backend.MLIR: "compiled_kernels.expert_linear.mlir:expert_linear",
        Backend.TRITON: "compiled_kernels.expert_linear.triton:expert_linear",
    },
)


def expert_linear_reference(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], shape_of(weight)[0])
    for number in torch.unique(expert).tolist():
        rows = (expert == number).nonzero()[:, 0]
        out[rows] = F.linear(x[rows], from_panels(weight[number]), None if bias is None else bias[number])
    return out


def expert_linear(
    x: Float[Tensor, "row width"],
    expert: Int[Tensor, " row"],
    weight: Float[Tensor, "expert out width"] | Float[Tensor, "expert panel step column value"],
    bias: Float[Tensor, "expert out"] | None = None,
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
        backend: the backend.
    """
    if backend is Backend.EAGER:
        return expert_linear_reference(x, expert, weight, bias)
    # Which experts are named no graph can read: inside one, products of many rows are opaque.
    if (
        backend is Backend.INDUCTOR
        and torch.compiler.is_compiling()
        and x.shape[0] <= MAX_TRACED_ROWS
        and x.device.type == "cpu"
        and not in_panels(weight)
    ):
        return traced(x, expert, weight, bias)
    return EXPERT_LINEAR.implementation(backend)(x, expert, weight, bias)


def traced(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply few rows in a graph: each matrix is read in place, inside the sum over its columns."""
    exact = torch.promote_types(x.dtype, torch.float32)
    out = (weight[expert].to(exact) * x.to(exact)[:, None]).sum(dim=-1)
    return (out if bias is None else out + bias[expert].to(exact)).to(x.dtype)
