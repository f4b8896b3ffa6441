"""Top-a: remove tokens below a share of the largest probability squared.

BlinkDL, 2021 (RWKV-LM, "The top-a sampling method"), with p the distribution of the next token:

    kept  =  { v : p(v) >= a * max(p) ^ 2 }

Where the model is certain the bound is high, where it is not the bound falls with the square: it is a min-p whose share
is itself relative to the largest probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import History


@dataclass(frozen=True)
class TopA:
    """A filter."""

    a: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.a <= 1:
            raise WorkbenchError(f"a must be from 0 to 1, not {self.a}")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        p = logits.softmax(-1)
        return logits.masked_fill(p < self.a * p.amax(-1, keepdim=True).square(), -torch.inf)
