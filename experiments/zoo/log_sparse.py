"""LogSparse: a query sees a few newest tokens, and one token at each power of two before it.

Li et al., 2019, "Enhancing the Locality and Breaking the Memory Bottleneck of Transformer on Time Series Forecasting",
equation 4 with local attention:

    visible(q, k)  =  0 <= q - k < w  or  q - k in {2^0, 2^1, 2^2, ...}

So log2 n keys stand for the far past, and information crosses a text of n tokens in log2 n layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

POWERS = 24  # of two: positions that kernels know


@dataclass(frozen=True)
class LogSparse:
    """A mask of the last `window` tokens and of those at distances that are powers of two."""

    window: int = 64

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        seen = distance < self.window
        for power in range(POWERS):
            if 1 << power >= self.window:
                seen = seen | (distance == 1 << power)
        return (key <= query) & seen
