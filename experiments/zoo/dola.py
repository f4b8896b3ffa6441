"""DoLa: contrast the last layer's logits with those of the earlier layer that disagrees with it most.

Chuang et al., 2023, "DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models", equations 2 to
6, with q(j) the distribution that the head gives after j layers, N of all, and JSD the Jensen-Shannon divergence:

    M          =  argmax over j in the early layers of  JSD(q(N), q(j))
    logit'(v)  =  log q(N)(v) - log q(M)(v)   where q(N)(v) >= alpha * max q(N),   else -inf

What a later layer adds to an early one is kept, what the early one knew is taken away. Here JSD is in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import History


@dataclass(frozen=True)
class DoLa:
    """A filter over the logits of every `step`-th layer from `first` to below `stop`; 0 is the embedding."""

    first: int = 0
    stop: int = 5
    step: int = 2
    alpha: float = 0.1

    def __post_init__(self) -> None:
        if not (0 <= self.first < self.stop and self.step >= 1 and 0 <= self.alpha <= 1):
            raise WorkbenchError(f"{self}: first is below stop, step 1 or more, alpha from 0 to 1")

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.stop, self.step))

    def __call__(self, logits: Tensor, histories: Sequence[History], early: Tensor) -> Tensor:
        final, before = logits.double().log_softmax(-1), early.double().log_softmax(-1)  # early: [layer, sample, vocab]
        farthest = self.divergence(final, before).argmax(0)  # [sample]
        chosen = before[farthest, torch.arange(len(logits), device=logits.device)]
        plausible = final >= final.amax(-1, keepdim=True) + torch.tensor(self.alpha).double().log()
        return (final - chosen).to(logits.dtype).masked_fill(~plausible, -torch.inf)

    def divergence(self, final: Tensor, before: Tensor) -> Tensor:
        """Return JSD [layer, sample] of log-probabilities [sample, vocab] and [layer, sample, vocab]."""
        p, q = final.exp(), before.exp()
        middle = ((p + q) / 2).log()
        return (p * (final - middle)).nansum(-1) / 2 + (q * (before - middle)).nansum(-1) / 2
