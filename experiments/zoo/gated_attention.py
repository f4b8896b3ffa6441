"""Gated attention: each head's result is multiplied by a sigmoid of the layer's input.

Qiu et al., 2025, "Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free", section
2.2, the elementwise gate at position G1:

    head  =  SDPA(Q, K, V) * sigmoid(X W)

W is trained in the paper. Here it begins at 0 with a bias, so that all gates are open alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.parts import Attention


class GatedAttention(Attention):
    """Attention with a gate: q is [token, head, query and gate]. Gates begin as sigmoid(`bias`)."""

    def __init__(self, spec, hidden_size: int, *slots, bias: float = 4.0, **more):
        super().__init__(spec, hidden_size, *slots, **more)
        self.gate = nn.Parameter(torch.zeros(spec.num_heads * spec.head_dim, hidden_size))
        self.bias = bias

    def qkv_proj(self, x: Tensor, cos, sin) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv_proj(x, cos, sin)
        gate = nn.functional.linear(x, self.gate).view_as(q) + self.bias
        return torch.cat([q, gate], dim=-1), k, v

    def attend(self, q: Tensor, batch, cache, backend=None) -> Tensor:
        query, gate = q.chunk(2, dim=-1)
        return super().attend(query.contiguous(), batch, cache, backend) * torch.sigmoid(gate)
