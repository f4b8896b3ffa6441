from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    for number in torch.unique(expert).tolist():
        rows = (expert == number).nonzero()[:, 0]
        out[rows] = F.linear(x[rows], weight[number], None if bias is None else bias[number])
    return out
