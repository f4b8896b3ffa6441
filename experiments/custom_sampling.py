"""Custom ways of sampling, added from outside as any user would.

In an experiment they are named by their import path:

    sampling:
      filters: [{path: "experiments.custom_sampling:Typical", arguments: {mass: 0.9}}]
      sampler: {path: "experiments.custom_sampling:Mirostat", arguments: {surprise: 3.0}}

Both keep to the public protocol: a filter is called with logits and histories, a sampler starts and chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Typical:
    """Keep the tokens whose surprise is nearest the entropy until they hold `mass` (Meister et al., 2022)."""

    mass: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.mass < 1:
            raise ValueError(f"mass must be between 0 and 1, not {self.mass}")

    def __call__(self, logits: Tensor, histories=()) -> Tensor:
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs * logprobs.exp()).nansum(-1, keepdim=True)
        distances, order = (-logprobs - entropy).abs().sort()
        reached = logits.gather(-1, order).softmax(-1).cumsum(-1)
        last = (reached < self.mass).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
        removed = distances > distances.gather(-1, last)
        removed[:, 0] = False
        return logits.masked_fill(removed.scatter(-1, order, removed), -torch.inf)


@dataclass(frozen=True)
class Mirostat:
    """Mirostat 2 (Basu et al., 2021): hold the surprise of the text near `surprise` bits a token.

    The state is mu, the most surprise a token may have: tokens above it are left out, and one of the others is sampled.
    Then mu moves by `rate` times the distance of that token's surprise from the target.
    """

    surprise: float = 3.0
    rate: float = 0.1

    def start(self) -> float:
        return 2 * self.surprise

    def choose(self, logits: Tensor, uniform: float, mu: float) -> tuple[int, float]:
        bits = logits.double().log_softmax(-1) / -math.log(2)
        bits, order = bits.sort(stable=True)
        bits = bits[: max(1, int((bits <= mu).sum()))]
        reached = torch.exp2(-bits).cumsum(-1)
        place = int((reached <= uniform * reached[-1]).sum().clamp(max=len(bits) - 1))
        return int(order[place]), mu - self.rate * (float(bits[place]) - self.surprise)
