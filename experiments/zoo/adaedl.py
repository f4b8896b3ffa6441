"""AdaEDL: a draft ends where a lower bound on its acceptance falls below a threshold that follows the acceptance rate.

Agrawal et al., 2024, "AdaEDL: Early Draft Stopping via an Entropy-based Lower Bound on Token Acceptance Probability",
equations 4 to 7, with the draft's entropy H(q) and the acceptance rate r:

    stop    where  1 - sqrt(c H(q)) < s
    r       =  b1 r + (1 - b1) accepted / drafted
    s       =  b2 s + (1 - b2) (s + e sign(a - r))

The threshold is one for all requests: what it learns of a draft model holds for the next request too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.parts import Verification


@dataclass
class EntropyBound:
    """A rule that ends drafts: `weight` is c, `goal` a, `step` e; `threshold` and `rate` are s and r as they begin."""

    weight: float = 0.2
    goal: float = 0.9
    step: float = 0.01
    rate_decay: float = 0.5  # b1
    threshold_decay: float = 0.9  # b2
    threshold: float = 0.3
    rate: float = 0.9
    observed_top_k: int = 0

    def __call__(self, probabilities: Tensor, request_ids: Many[str]) -> Tensor:
        entropy = torch.special.entr(probabilities).sum(-1)
        return 1 - (self.weight * entropy).sqrt() < self.threshold

    def observe(self, verifications: Many[Verification]) -> None:
        drafted = sum(len(each.draft) for each in verifications)
        if not drafted:
            return
        accepted = sum(len(each.accepted) for each in verifications) / drafted
        self.rate = self.rate_decay * self.rate + (1 - self.rate_decay) * accepted
        moved = self.threshold + self.step * (math.copysign(1, self.goal - self.rate) if self.goal != self.rate else 0)
        self.threshold = self.threshold_decay * self.threshold + (1 - self.threshold_decay) * moved
