"""Locally typical sampling: keep the tokens whose surprise is nearest the entropy, until they hold a given mass.

Meister et al., 2022, "Locally Typical Sampling", equation 10, where p is the model's distribution of the next token:

    H     =  - sum over v of p(v) log p(v)
    C     =  argmin over sets C of  sum over v in C of | H + log p(v) |,  with  sum over v in C of p(v) >= mass
    q(v)  =  p(v) / (sum over C of p)  for v in C,  else 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import History


@dataclass(frozen=True)
class Typical:
    """A filter that keeps a share of `mass`, 0 to 1, of each row."""

    mass: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.mass < 1:
            raise WorkbenchError(f"mass must be between 0 and 1, not {self.mass}")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs * logprobs.exp()).nansum(-1, keepdim=True)
        distances, order = (-logprobs - entropy).abs().sort()  # [sample, vocab], the most typical first
        reached = logits.gather(-1, order).softmax(-1).cumsum(-1)
        last = (reached < self.mass).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
        removed = distances > distances.gather(-1, last)
        removed[:, 0] = False
        return logits.masked_fill(removed.scatter(-1, order, removed), -torch.inf)
