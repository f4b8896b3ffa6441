from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = exact.chunk(2, dim=-1)
    cos, sin = (rearrange(part, "token half -> token 1 half") for part in (cos, sin))
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
