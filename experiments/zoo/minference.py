"""MInference: heads have patterns of their own - a window with sinks, vertical and slash lines, blocks.

Jiang et al., 2024, "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention",
section 3, one mask for each of three kinds of heads, where c is the number of a block of 64 keys:

    A-shape          k < sinks  or  q - k < recent
    vertical-slash   c(k) mod vertical = 0  or  (c(q) - c(k)) mod slash = 0  or  q - k < recent
    block-sparse     h(c(q), c(k)) mod sparsity = 0  or  c(q) = c(k),  with h a hash

The paper finds each head's kind offline, and the lines and blocks anew for each prompt from its last queries. Here a
head's kind is its number modulo 3 and lines are fixed, so pages between them are never read, in prefill and in decode.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK = 64  # tokens


@dataclass(frozen=True)
class MInference:
    """A mask by head: one of three sparse patterns."""

    sinks: int = 64
    recent: int = 128
    vertical: int = 4  # every so many blocks a column of blocks that all queries see
    slash: int = 4  # every so many blocks a diagonal
    sparsity: int = 4

    def __call__(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        mine, other, kind = query // BLOCK, key // BLOCK, head % 3
        near = query - key < self.recent
        lines = (other % self.vertical == 0) | ((mine - other) % self.slash == 0)
        blocks = ((mine * 40503 ^ other * 30011) % 65536 % self.sparsity == 0) | (mine == other)
        seen = ((kind == 0) & ((key < self.sinks) | near)) | ((kind == 1) & (lines | near)) | ((kind == 2) & blocks)
        return (key <= query) & seen
