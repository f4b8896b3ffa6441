"""Mirostat 2: hold the surprise of the text near a target, by a bound on each token's surprise that learns.

Basu et al., 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity", algorithm 2, with
s(v) = -log2 p(v) the surprise of a token in bits, and mu the bound, 2 * target at first:

    sample v from the tokens with s(v) <= mu, p renormalised
    mu  <-  mu - rate * (s(v) - target)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import sample_categorical


@dataclass(frozen=True)
class Mirostat:
    """A sampler; its state is mu, in bits."""

    target: float = 3.0
    rate: float = 0.1

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.rate >= 0):
            raise WorkbenchError(f"{self}: target is above 0, rate 0 or more")

    def start(self) -> float:
        return 2 * self.target

    def choose(self, logits: Tensor, uniform: float, mu: float) -> tuple[int, float]:
        surprise = logits.double().log_softmax(-1) / -math.log(2)
        within = surprise <= max(mu, float(surprise.min()))  # one token is always left
        token = sample_categorical(torch.exp2(-surprise).where(within, 0)[None], [uniform])[0]
        return token, mu - self.rate * (float(surprise[token]) - self.target)
