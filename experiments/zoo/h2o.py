"""H2O: of the older tokens those stay that have received the most attention, the heavy hitters.

Zhang et al., 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", section 4:

    F_t(i)   =  sum over queries s <= t of softmax_s(q_s . k / sqrt(d))_i       (attention that token i has received)
    S_t      =  the newest r tokens, and of the others those with the highest F_t, k together      (greedy)

Each key/value head chooses for itself, by the sum over its query heads. The paper evicts one token with every step;
here a block of them goes at once, an eighth of the budget.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from workbench.parts import ContinuousEviction, select_recent_and_heaviest


class H2O(ContinuousEviction):
    recent: float = 0.5  # fraction of the budget for the newest tokens

    observes: ClassVar[int | None] = None  # every query counts, those of decodes too

    def select(self, mass: Tensor, budget: int) -> Tensor:
        return select_recent_and_heaviest(mass, budget, max(1, round(self.recent * budget)))
