"""Native sparse attention's selected branch: blocks chosen by compressed keys, beside the text's first block.

Yuan et al., 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention", sections 3.2 and
3.3.2. The paper compresses a block by a trained network; here it is the mean of its keys:

    k_cmp(i)  =  mean over k in block i of k,      p(i)  =  q . k_cmp(i), highest over the query heads of a group
    selected  =  the first block, the query's own, and the blocks with the highest p(i)

The other two branches, over compressed keys themselves and over a window, are left out, as are the gates between the
three, which are trained. Blocks are half as long as those of MoBA, and more of them are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SelectedBlocks:
    """A choice of blocks by compressed keys; the first block is always read."""

    keep: int = 6  # blocks beside the first and the query's own
    page_size: int = 32  # tokens of a block
    first: int = 1

    summaries = ("mean",)

    def __call__(self, query: Tensor, compressed: Tensor) -> Tensor:
        return query * compressed
