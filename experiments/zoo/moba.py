"""Mixture of Block Attention: a query reads the blocks whose mean key has the highest product with it.

Lu et al., 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", equations 4 to 6, for blocks I_i of the text:

    s_i  =  q . mean over k in I_i of k
    g_i  =  1 for the blocks with the highest s_i, and for the query's own block;  else 0
    o_q  =  softmax attention over the keys of the blocks with g_i = 1

A block is a page here, and query heads that share keys and values read the same blocks, those of the highest score
among them. The paper trains its models with it, and leaves the last layers dense.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MoBA:
    """A choice of blocks by their mean key."""

    keep: int = 3  # blocks beside the query's own
    page_size: int = 64  # tokens of a block

    summaries = ("mean",)

    def __call__(self, query: Tensor, mean: Tensor) -> Tensor:
        return query * mean
