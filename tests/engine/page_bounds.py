"""A user's choice of pages by bounds of their keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    keep: int = 2
    page_size: int = 8
    first: int = 0
    summaries = ("min", "max")

    def __call__(self, query: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.maximum(query * low, query * high)
