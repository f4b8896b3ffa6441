"""Top-n-sigma: keep the tokens whose logits lie within n standard deviations of the largest.

Tang et al., 2024, "Top-n-sigma: Not All Logits Are You Need", equation 5, with l the logits of the next token:

    kept  =  { v : l(v) >= max(l) - n * sigma(l) }

Most logits are noise around a mean, few stand out. As sigma grows with the logits, the set is the same at any
temperature. Here sigma is that of the tokens which no earlier filter has removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench import WorkbenchError
from workbench.parts import History


@dataclass(frozen=True)
class TopNSigma:
    """A filter that keeps `n` standard deviations below the largest logit of each row."""

    n: float = 1.0

    def __post_init__(self) -> None:
        if not self.n > 0:
            raise WorkbenchError(f"n must be above 0, not {self.n}")

    def __call__(self, logits: Tensor, histories: Sequence[History] = ()) -> Tensor:
        below = logits.double() - logits.amax(-1, keepdim=True).double()  # float64: a row's sum hangs on no neighbour
        left = below > -torch.inf
        count = left.sum(-1, keepdim=True)
        mean = below.where(left, 0).sum(-1, keepdim=True) / count
        sigma = ((below - mean).square().where(left, 0).sum(-1, keepdim=True) / count).sqrt()
        return logits.masked_fill(below < -self.n * sigma, -torch.inf)
