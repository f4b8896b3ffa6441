"""BigBird: blocks of queries see a window of blocks, the first blocks, and a few pseudo-random ones.

Zaheer et al., 2020, "Big Bird: Transformers for Longer Sequences", section 2, where i and j are the blocks of query and
key (token // b):

    visible(q, k)  =  k <= q  and  ( i - j < w  or  j < g  or  j in {r_1(i), ..., r_n(i)} )
    r_t(i)         =  ((101 i + 57 t + 31) mod 8191) mod (i + 1)

The paper draws random blocks once for a model and a head, and looks both ways; here a formula stands for the draw,
equal for all heads, so that a page that no query needs is not read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BigBird:
    """A mask of blocks of `block` tokens: `window` and `first` blocks, and `random` ones for each block of queries."""

    block: int = 64
    window: int = 3
    first: int = 1
    random: int = 2

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        mine, other = query // self.block, key // self.block
        seen = (mine - other < self.window) | (other < self.first)
        for draw in range(self.random):
            seen = seen | (other == (101 * mine + 57 * draw + 31) % 8191 % (mine + 1))
        return (key <= query) & seen
