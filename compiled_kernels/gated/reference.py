from __future__ import annotations

import math

import torch
from torch import Tensor


def reference(gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu(gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    # (1 + tanh z) / 2 is the sigmoid of 2 z.
    twice = math.sqrt(8 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return (gate * torch.sigmoid(twice) * up).to(gate_up.dtype)


def clamped(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = _halves(gate_up)
    gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, limit * up.sign(), up)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)


def _halves(gate_up: Tensor) -> tuple[Tensor, ...]:
    """Return gate and up, in float32 at the least."""
    return gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
