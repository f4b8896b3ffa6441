"""Sparse Transformer: a query sees its own block and the last columns of every block before it.

Child et al., 2019, "Generating Long Sequences with Sparse Transformers", section 4.2, with a stride l:

    strided   visible(q, k)  =  k <= q  and  ( q - k < l  or  (q - k) mod l = 0 )
    fixed     visible(q, k)  =  k <= q  and  ( floor(k / l) = floor(q / l)  or  k mod l >= l - c )

The paper gives the two halves of a pattern to two heads, or merges them in one head, as here. It uses `strided` for
images and `fixed` for text.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workbench import WorkbenchError


@dataclass(frozen=True)
class SparseTransformer:
    """A mask with a `stride` in tokens; a fixed pattern shows the last `columns` of each block."""

    stride: int = 128
    columns: int = 16
    pattern: str = "fixed"

    def __post_init__(self) -> None:
        if self.pattern not in ("fixed", "strided"):
            raise WorkbenchError(f"pattern {self.pattern!r}: write fixed or strided")

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        if self.pattern == "strided":
            seen = (query - key < self.stride) | ((query - key) % self.stride == 0)
        else:
            own = key // self.stride == query // self.stride
            seen = own | (key % self.stride >= self.stride - self.columns)
        return (key <= query) & seen
