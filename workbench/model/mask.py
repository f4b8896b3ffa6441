"""Who may look where: predicates over positions that broadcast, True where the query sees the key."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Causal:
    """Every position up to the query's own."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query


@dataclass(frozen=True)
class SlidingWindow:
    """The last `window` positions, the query's own included (Mistral, Beltagy et al. 2020)."""

    window: int

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - self.window)

