"""KNorm: tokens with short keys stay, no attention weight is looked at.

Devoto et al., 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", section 3:

    keep  =  the tokens of a head with the smallest ||k_i||_2        (short keys receive the most attention)

The norm of a key is the same before and after rotary, but for its last bits: norms are rounded to eleven, and of equal
ones the older token stays. The newest tokens, `recent` of the budget, stay in any case. The paper does not compress its
first two layers; here every layer holds the same number of tokens.
"""

from __future__ import annotations

from torch import Tensor

from workbench.parts import ContinuousEviction, LayerTokens


class KNorm(ContinuousEviction):
    recent: float = 0.25  # fraction of the budget for the newest tokens

    def select_layer(self, layer: LayerTokens, budget: int) -> Tensor:
        norms = layer.keys.norm(dim=-1).half()
        norms[:, -max(1, round(self.recent * budget)) :] = -1
        kept = norms.sort(dim=1, stable=True).indices[:, :budget]
        return norms.new_zeros(norms.shape).bool().scatter(1, kept, True)
