"""CaM: the values of evicted tokens are added to those of the newest, the more the more attention they received.

Zhang et al., 2024, "CaM: Cache Merging for Memory-efficient LLMs Inference", section 4, for a token i that H2O evicts:

    A(i)  =  attention that i has received,       A(R)  =  mean of A over the newest tokens R
    v_j   =  v_j + m_i v_i / |R|   for each j in R,         m_i ~ Bernoulli(clamp(A(i) / A(R), 0, 1))

so that what the newest tokens receive later reaches the values that are gone; keys stay. A step must be repeatable, so
here the draw is replaced by its expectation: m_i = clamp(A(i) / A(R), 0, 1). Without merging it is H2O, with which it
is compared. Each key/value head merges what it evicts itself, a block of tokens at once.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from workbench.parts import ContinuousEviction, LayerTokens, select_recent_and_heaviest


class CaM(ContinuousEviction):
    recent: float = 0.5  # fraction of the budget for the newest tokens, into which the others are merged

    observes: ClassVar[int | None] = None

    def select_layer(self, layer: LayerTokens, budget: int) -> Tensor:
        keep = torch.zeros_like(layer.mass, dtype=torch.bool)
        for head, mass in enumerate(layer.mass):
            keep[head, select_recent_and_heaviest(mass, budget, self.newest(budget))] = True
        return keep

    def merge(self, layer: LayerTokens, keep: Tensor) -> tuple[Tensor, Tensor]:
        newest = self.newest(int(keep[0].sum()))
        share = layer.mass / layer.mass[:, -newest:].mean(1, keepdim=True).clamp_min(1e-9)
        weight = torch.where(keep, 0.0, share.clamp(0, 1)).to(layer.values.dtype)
        values = layer.values.clone()
        values[:, -newest:] += (weight[..., None] * layer.values).sum(1, keepdim=True) / newest
        return layer.keys, values

    def newest(self, budget: int) -> int:
        return max(1, round(self.recent * budget))
