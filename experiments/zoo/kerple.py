"""Kerple: scores fall with the logarithm of the distance, as a kernel of conditionally positive definite kind.

Chi et al., 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation", equation 8, logarithmic:

    score(q, k)  =  q . k / sqrt(d)  -  r1 log(1 + r2 (q - k)),    r1, r2 > 0

The paper learns r1 and r2 of each head and has no other position. Here they are given, equal for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kerple:
    """A score function: a logarithmic penalty of distance."""

    r1: float = 1.0
    r2: float = 1.0

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - self.r1 * torch.log1p(self.r2 * (query - key).abs().to(score.dtype))
