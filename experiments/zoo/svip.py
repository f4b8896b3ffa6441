"""SVIP: a draft ends where the entropy of the draft's own distribution is high.

Zhang et al., 2024, "Draft Model Knows When to Stop", section 3.2: the chance that a token is accepted is bounded from
below through the KL divergence (Pinsker), whose cross entropy is taken to be proportional to the draft's entropy H(q):

    accepted  =  sum over w of min(p(w), q(w))  >=  1 - sqrt(KL(q || p) / 2)  ~  1 - sqrt(c H(q))
    stop      where  sqrt(H(q)) > most,     H(q) = - sum over w of q(w) log q(w)

It is the draft's entropy before the token is chosen, so the tokens that are proposed keep their distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import WorkbenchError


@dataclass(frozen=True)
class SelfVerification:
    most: float = 1.0  # the square root of nats

    def __post_init__(self) -> None:
        if self.most < 0:
            raise WorkbenchError(f"most must be at least 0, not {self.most}")

    def __call__(self, probabilities: Tensor, request_ids: Sequence[str]) -> Tensor:
        return torch.special.entr(probabilities).sum(-1).sqrt() > self.most
