"""Tail-free sampling: cut the tail where the sorted probabilities stop to curve.

Phénix and Egan, 2019, "Tail Free Sampling", with p sorted, the most probable first:

    d(i)  =  | (p(i+2) - p(i+1)) - (p(i+1) - p(i)) |  /  (the sum of these)
    kept  =  the tokens up to the first i with  d(0) + ... + d(i) > z
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import History


@dataclass(frozen=True)
class TailFree:
    """A filter that keeps a share of `z` of the curvature, 0 to 1."""

    z: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.z <= 1:
            raise WorkbenchError(f"z must be above 0, at most 1, not {self.z}")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        if logits.shape[-1] < 3 or self.z == 1:
            return logits.clone()
        p, order = logits.double().softmax(-1).sort(descending=True, stable=True)  # [sample, vocab]
        curve = p.diff(n=2).abs()  # [sample, vocab - 2]
        reached = curve.cumsum(-1)
        kept = (reached <= self.z * reached[:, -1:]).sum(-1, keepdim=True) + 1
        removed = torch.arange(p.shape[-1], device=p.device) >= kept
        removed &= reached[:, -1:] > 0  # probabilities in a straight line have no tail
        return logits.masked_fill(torch.empty_like(removed).scatter_(-1, order, removed), -torch.inf)
