"""p-less sampling: keep the tokens at least as likely as a guess would be right; there is nothing to set.

Tan et al., 2025, "p-less Sampling: A Robust Hyperparameter-Free Approach for LLM Decoding", equation 2. The bound is
the probability that two tokens sampled from p, one apart from the other, are the same (its Rényi entropy of order 2):

    kept  =  { v : p(v) >= sum over w of p(w) ^ 2 }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.parts import History

ROUNDING = 1e-12  # a constant row's bound is its tokens' own probability


@dataclass(frozen=True)
class PLess:
    """A filter without a setting. The bound never exceeds the largest probability, so one token is always left."""

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        p = logits.double().softmax(-1)
        bound = p.square().sum(-1, keepdim=True) * (1 - ROUNDING)
        return logits.masked_fill(p < bound, -torch.inf)
