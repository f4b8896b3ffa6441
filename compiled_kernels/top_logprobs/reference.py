from __future__ import annotations

import torch
from torch import Tensor


def log_softmax(logits: Tensor) -> Tensor:
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shifted = exact - exact.amax(dim=-1, keepdim=True)
    return (shifted - shifted.exp().sum(dim=-1, keepdim=True).log()).to(logits.dtype)


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    # Ordered by the logits themselves: rounding a log probability must not make neighbours equal.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return log_softmax(logits).gather(-1, ids), ids
