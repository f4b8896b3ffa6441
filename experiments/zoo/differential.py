"""Differential attention: the difference of two softmax maps, so that what both attend to cancels.

Ye et al., 2024, "Differential Transformer", equations 1 to 3, for each head with queries, keys in two halves:

    A  =  softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))
    head  =  (1 - lambda_init) RMSNorm(A V)

A half takes every other pair of columns that rotary turns together. One call attends with twice as many heads, whose
queries are zero in the other half's columns. Lambda is learned in the paper; here it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.parts import Attention


def half_columns(dim: int, half: int) -> Tensor:
    """Return which columns of a head belong to a half: pairs (i, i + dim / 2), i even or odd."""
    return torch.arange(dim) % (dim // 2) % 2 == half


class Differential(Attention):
    """Attention with `lam` times a second map taken away; with `norm` each head's result is normed, as published."""

    def __init__(self, *slots, lam: float = 0.8, norm: bool = True, **more):
        super().__init__(*slots, **more)
        self.lam, self.norm = lam, norm
        self.scale = self.scale * 2**0.5  # of half as many columns
        halves = torch.stack([half_columns(self.spec.head_dim, half) for half in (0, 1)])
        self.halves = torch.nn.Buffer(halves.float(), persistent=False)

    def attend(self, q: Tensor, batch, cache, backend=None) -> Tensor:
        groups, shape = self.spec.num_kv_heads, q.shape
        halves = self.halves.to(q.dtype).view(2, 1, 1, 1, -1)
        queries = (halves * q.view(1, shape[0], groups, -1, shape[2])).permute(1, 2, 0, 3, 4)  # token group half share
        mixed = super().attend(queries.reshape(shape[0], -1, shape[2]), batch, cache, backend)
        first, second = mixed.view(shape[0], groups, 2, -1, shape[2]).unbind(2)
        out = (first - self.lam * second).float().reshape(shape)
        if self.norm:
            out = (1 - self.lam) * out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-5)
        return out.to(q.dtype)
