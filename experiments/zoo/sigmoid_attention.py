"""Sigmoid attention: every key has a weight of its own between 0 and 1, and no softmax divides them.

Ramapuram et al., 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", equations 3 and 4, where n is
the length of the text:

    o_q  =  sum over k <= q of sigmoid(q . k / sqrt(d) + b) v_k,    b = - log n

A score function with `normalized = False` gives the logarithm of the weight. Here n is the number of keys that a query
sees, q + 1, so that a text's beginning does not depend on its end. The models of the paper are trained with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sigmoid:
    """A score function: the logarithm of a sigmoid, whose bias falls with the number of visible keys."""

    bias: float = 0.0  # added to - log n

    normalized = False

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        moved = score + self.bias - torch.log((query + 1).to(score.dtype))
        # log sigmoid(x) = min(x, 0) - log(1 + exp(-|x|)), which overflows nowhere
        return torch.minimum(moved, torch.zeros_like(moved)) - torch.log1p(torch.exp(-moved.abs()))
