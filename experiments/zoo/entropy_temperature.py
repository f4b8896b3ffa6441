"""EDT: a temperature for each token, low where the model is certain and high where it is not.

Zhang et al., 2024, "EDT: Improving Large Language Models' Generation by Entropy-based Dynamic Temperature Sampling",
equation 6, with H the entropy of the next token's distribution in nats:

    T  =  highest * 0.8 ^ (theta / H)

A certain row (H near 0) would have T near 0: here T is at least 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import History

LEAST = 0.01


@dataclass(frozen=True)
class EntropyTemperature:
    """A filter that removes nothing; it takes the place of the setting `temperature`, which stays 1."""

    highest: float = 1.0
    theta: float = 1.0

    def __post_init__(self) -> None:
        if not (self.highest >= LEAST and self.theta >= 0):
            raise WorkbenchError(f"{self}: highest is {LEAST} or more, theta 0 or more")

    def temperature(self, logits: Tensor) -> Tensor:
        """Return T of each row: [sample, 1]."""
        p = logits.softmax(-1)
        entropy = -torch.special.xlogy(p, p).sum(-1, keepdim=True)
        exponent = self.theta / entropy.clamp(min=1e-6)
        return (self.highest * 0.8**exponent).clamp(min=LEAST)

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        return (logits - logits.amax(-1, keepdim=True)) / self.temperature(logits)
