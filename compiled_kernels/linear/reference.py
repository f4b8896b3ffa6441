from __future__ import annotations

from einops import einsum
from torch import Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = einsum(x, weight, "token width, out width -> token out")
    return out if bias is None else out + bias
