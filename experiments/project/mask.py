"""A mask of your own: which keys a query sees. Change it, then run `pytest`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Dilated:
    """See the last `near` tokens, and of those before them every `step`-th (Longformer: Beltagy et al., 2020)."""

    near: int = 64
    step: int = 8

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((query - key < self.near) | (key % self.step == 0))
