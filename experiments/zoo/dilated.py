"""Dilated window: some heads see every d-th token of a window, so as many keys reach d times as far.

Beltagy et al., 2020, "Longformer: The Long-Document Transformer", section 3.1:

    visible(q, k)  =  0 <= q - k < w d  and  (q - k) mod d = 0

The first `plain` heads keep d = 1, as the paper's lower layers and most of its heads do. A window of w d tokens beside
the mask frees the pages that no head sees. The paper's windows look both ways and its models are trained with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Dilated:
    """A mask by head: `window` keys, `step` tokens apart, or next to one another for the first `plain` heads."""

    window: int = 128  # keys
    step: int = 2  # tokens
    plain: int = 2  # heads

    def __call__(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        distance = query - key
        spread = (distance % self.step == 0) & (distance < self.window * self.step)
        near = (head < self.plain) & (distance < self.window)
        return (key <= query) & (near | ((head >= self.plain) & spread))
