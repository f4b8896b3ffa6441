"""PyramidKV: lower layers keep more tokens than higher ones, SnapKV's choice in each.

Cai et al., 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", section 4, with m
layers that keep k tokens on average beside the last w of the prompt:

    k_top   =  k / beta,     k_0  =  2 k - k_top               (the mean over the layers is k)
    k_l     =  k_0 - (k_0 - k_top) l / (m - 1)
    keep_l  =  the last w tokens, and of the others the k_l with the highest pooled attention of these w queries

A sequence holds as many slots in every layer as the lowest needs, nearly twice the budget: the technique shows here
what it does to quality, and saves no memory beside SnapKV of the same slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.parts import EvictionSettings, LayerTokens, select_recent_and_heaviest, smooth_mass


class PyramidKV(EvictionSettings):
    observe: int = 32  # queries at the prompt's end whose attention counts; their tokens stay
    pool: int = 7  # attention is averaged over this many neighbours
    beta: float = 20  # how many times the highest layer's tokens the mean is

    @property
    def observes(self) -> int:
        return self.observe

    @property
    def spread(self) -> float:
        return 2 - 1 / self.beta

    def select_layer(self, layer: LayerTokens, budget: int) -> Tensor:
        window = min(self.observe, budget)
        top = (budget - window) / self.beta
        lowest = 2 * (budget - window) - top
        depth = layer.layer / (layer.num_layers - 1) if layer.num_layers > 1 else 0.5
        count = min(layer.slots, window + int(lowest - (lowest - top) * depth))
        keep = torch.zeros_like(layer.mass, dtype=torch.bool)
        for head, mass in enumerate(smooth_mass(layer.mass, self.pool)):
            keep[head, select_recent_and_heaviest(mass, count, window)] = True
        return keep
