"""Soft-capped scores: no score leaves the interval from -c to c, however large the product of query and key.

Gemma Team, 2024, "Gemma 2: Improving Open Language Models at a Practical Size", section 2:

    s  ->  c tanh(s / c)

The setting `attention.softcap` is the same; this is how it reads as a score function, and a test holds the two to each
other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TanhSoftcap:
    """A score function: every score between -`cap` and `cap`."""

    cap: float = 50.0

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)
