"""A product with a weight matrix, for few rows (decode) and many (prefill)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.lanes import Lane


def linear(
    x: Float[Tensor, "token width"], weight: Float[Tensor, "out width"], bias: Tensor | None, lane: Lane
) -> Tensor:
    """x @ weight.T + bias: [token, out] in the type of `x`.

    Under `inductor` one row is a multiply-reduce that reads each weight once at the memory's pace, where a
    library's matrix product reaches about half of it.
    """
    if lane is Lane.INDUCTOR and x.shape[0] == 1 and x.device.type == "cpu":
        exact = torch.promote_types(x.dtype, torch.float32)
        out = (weight.to(exact) * x.to(exact)).sum(dim=-1)[None]
        return (out if bias is None else out + bias.to(exact)).to(x.dtype)
    return F.linear(x, weight, bias)
