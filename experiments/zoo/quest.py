"""Quest: a query reads the pages whose keys could have the highest products with it, by bounds of each column.

Tang et al., 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", section 3.2: of each page P
the smallest and the largest key are kept, column by column, and bound every product of a key of the page with q:

    m_i  =  min over k in P of k_i,    M_i  =  max over k in P of k_i
    U(q, P)  =  sum over i of max(q_i m_i, q_i M_i)  >=  q . k   for every k in P

The `keep` pages with the highest bounds are read whole, and the query's own. Query heads that share keys and values
read the same pages here, those of the highest bound among them; the paper's models share none. Every layer chooses,
where the paper leaves the first two dense.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quest:
    """A choice of pages by the bounds of their keys."""

    keep: int = 16  # pages
    page_size: int = 16  # tokens

    summaries = ("min", "max")

    def __call__(self, query: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.maximum(query * low, query * high)
