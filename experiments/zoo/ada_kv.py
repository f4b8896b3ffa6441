"""Ada-KV: heads of a layer share its budget, and one with scattered attention keeps more tokens.

Feng et al., 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation", Algorithm 1, on SnapKV's scores
C (pooled attention of the last w queries), for h heads with b tokens each on average:

    B_i   =  how many of the h b highest C of all heads together are head i's         (Top-k over the whole layer)
    keep  =  for each head the last w tokens and its highest C, B_i of them; at least f b, the safeguard

Here a head keeps at most `most` b as well, since a sequence holds so many slots in every head: the technique shows
what it does to quality, and saves no memory beside SnapKV of the same slots. The safeguard is part of the choice, not a
mean afterwards: each head's f b highest come first, and all heads compete for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.parts import EvictionSettings, LayerTokens, smooth_mass


class AdaKV(EvictionSettings):
    observe: int = 32  # queries at the prompt's end whose attention counts; their tokens stay
    pool: int = 7  # attention is averaged over this many neighbours
    floor: float = 0.2  # fraction of the budget that each head keeps in any case
    most: float = 2.0  # times the budget that one head may keep

    @property
    def observes(self) -> int:
        return self.observe

    @property
    def spread(self) -> float:
        return self.most

    def select_layer(self, layer: LayerTokens, budget: int) -> Tensor:
        heads, slots = layer.mass.shape
        scores = smooth_mass(layer.mass, self.pool)
        scores[:, slots - min(self.observe, budget) :] = torch.inf
        ranks = scores.sort(dim=1, descending=True, stable=True).indices.argsort(1)  # 0: a head's highest
        scores[ranks < max(1, int(self.floor * budget))] = torch.inf
        scores[ranks >= layer.slots] = -torch.inf
        best = scores.flatten().sort(descending=True, stable=True).indices[: heads * budget]
        return torch.zeros_like(scores, dtype=torch.bool).flatten().index_fill(0, best, True).view(heads, slots)
