"""Scalable softmax: scores grow with the logarithm of the number of keys, so attention does not fade in long texts.

Nakanishi, 2025, "Scalable-Softmax Is Superior for Attention", equation 2, with n visible keys (after Su, 2021, and
Chiang and Cholak, 2022):

    SSMax(z)_i  =  n^(s z_i) / sum over j of n^(s z_j)  =  softmax(s log(n) z)_i

A head's s is learned in the paper. Here it is given: with s = 1 / log(m) a query that sees m keys is as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScalableSoftmax:
    """A score function: scores times `s` and the logarithm of the number of visible keys."""

    s: float = 0.1603  # 1 / log(512)

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score * self.s * torch.log((query + 1).to(score.dtype))
