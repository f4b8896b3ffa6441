"""A filter of your own: what becomes of the logits before a token is drawn. Change it, then run `pytest`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.parts import History


@dataclass(frozen=True)
class TopA:
    """Leave out tokens less probable than `a` times the square of the most probable one's probability."""

    a: float = 0.2

    def __call__(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        probabilities = torch.softmax(logits, -1)
        highest = probabilities.amax(-1, keepdim=True)
        return logits.masked_fill(probabilities < self.a * highest**2, -torch.inf)
