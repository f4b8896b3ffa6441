"""TOVA: the token goes at which the newest query looks least.

Oren et al., 2024, "Transformers are Multi-State RNNs", section 3.2 (token omission via attention):

    a_t    =  mean over the heads of a layer of softmax(q_t . k / sqrt(d))       (q_t: the newest query alone)
    evict  =  argmin over the held tokens of a_t

All heads of a layer keep the same tokens; sinks and recent tokens are not protected, but for the newest. The paper
evicts one token with every step; here a block of them goes at once, an eighth of the budget.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from workbench.parts import ContinuousEviction, LayerTokens, select_recent_and_heaviest


class Tova(ContinuousEviction):
    observes: ClassVar[int | None] = None
    decay: ClassVar[float] = 0.0  # the last query alone counts

    def select_layer(self, layer: LayerTokens, budget: int) -> Tensor:
        attention = layer.mass.sum(0)
        keep = attention.new_zeros(layer.mass.shape[1]).bool()
        keep[select_recent_and_heaviest(attention, budget, 1)] = True
        return keep.expand_as(layer.mass)
