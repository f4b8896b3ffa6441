"""Eviction policies of a user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.kv_cache.eviction import EvictionSettings


class Newest(EvictionSettings):
    """A user's policy: the newest tokens."""

    def select(self, mass: Tensor, budget: int) -> Tensor:
        return torch.arange(len(mass) - budget, len(mass))


class Uneven(Newest):
    """The same, but that heads could keep unlike numbers."""

    @property
    def spread(self) -> float:
        return 1.5


class MergesLayers(Newest):
    """The same, whose merge makes it unfit for latent attention."""

    def merge(self, layer: Any, keep: Tensor) -> tuple[Tensor, Tensor]:
        return layer.keys, layer.values
