"""Eta sampling: remove tokens below a probability that is small where the distribution is certain, smaller where not.

Hewitt et al., 2022, "Truncation Sampling as Language Model Desmoothing", equations 4 and 5, with h the entropy of p:

    eta   =  min(epsilon, sqrt(epsilon) * exp(-h(p)))
    kept  =  { v : p(v) >= eta }

The most probable token is always kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import History


@dataclass(frozen=True)
class Eta:
    """A filter."""

    epsilon: float = 0.0009

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise WorkbenchError(f"epsilon must be between 0 and 1, not {self.epsilon}")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        p = logits.softmax(-1)
        entropy = -torch.special.xlogy(p, p).sum(-1, keepdim=True)
        eta = (self.epsilon**0.5 * (-entropy).exp()).clamp(max=self.epsilon)
        return logits.masked_fill((p < eta) & (logits < logits.amax(-1, keepdim=True)), -torch.inf)
