"""Self-speculation: the target's own layers, some of them skipped, draft the tokens that all of them verify.

Zhang et al., 2023, "Draft & Verify", equations 5 and 6. Which layers are kept is a setting (`layers`); a draft ends
where the draft is unsure of its likeliest token, below a threshold that follows the acceptance rate:

    stop    where  max over w of q(w) < g
    r       =  b2 r + (1 - b2) accepted / drafted
    g       =  b1 g + (1 - b1) (g + e  if  r <= a  else  g - e)

The paper chooses the layers by Bayesian optimization, attention and feed-forward apart; here whole layers are skipped,
and the kept ones have a cache of their own. The threshold is of each request.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.parts import Verification


@dataclass
class AdaptiveExit:
    """A rule that ends drafts: `goal` is a, `step` e, `start` the first threshold."""

    goal: float = 0.9
    start: float = 0.6
    step: float = 0.01
    threshold_decay: float = 0.5  # b1
    rate_decay: float = 0.9  # b2
    observed_top_k: int = 0
    kept: dict[str, tuple[float, float]] = field(default_factory=dict)  # request: threshold g and rate r

    def __call__(self, probabilities: Tensor, request_ids: Many[str]) -> Tensor:
        thresholds = [self.kept.get(name, (self.start, 1.0))[0] for name in request_ids]
        return probabilities.amax(-1) < torch.tensor(thresholds, dtype=probabilities.dtype, device=probabilities.device)

    def observe(self, verifications: Many[Verification]) -> None:
        for sequence, draft, accepted, *_ in verifications:
            if len(draft):
                threshold, rate = self.kept.get(sequence.request_id, (self.start, 1.0))
                rate = self.rate_decay * rate + (1 - self.rate_decay) * len(accepted) / len(draft)
                moved = threshold + (self.step if rate <= self.goal else -self.step)
                threshold = self.threshold_decay * threshold + (1 - self.threshold_decay) * moved
                self.kept[sequence.request_id] = threshold, rate

    def forget(self, request_id: str) -> None:
        self.kept.pop(request_id, None)
