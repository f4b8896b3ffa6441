"""The shape that attention of one long span is compiled for, and the types of its memory."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import PAGES, memref
from compiled_kernels.paged_attention.mlir_shape import PagedHeads

BLOCK = 64  # positions
ROWS = 4  # queries whose sums are in registers at once
TILE = 64  # queries (tokens times heads) that walk the context together


@dataclass(frozen=True, kw_only=True)
class SpanAttention(PagedHeads):
    """Attention of one span: how many tokens there are, and how long the context, is not compiled in.

    In the new layout of keys and values an element is a float32 number or, with `pairs`, two of bfloat16 in an i32.
    """

    @property
    def packed(self) -> str:
        """Return the type of an element of the new layout."""
        return "i32" if self.pairs else "f32"

    @property
    def each(self) -> int:
        """Return the numbers an element holds."""
        return 2 if self.pairs else 1

    @property
    def tokens(self) -> int:
        """Return the tokens of a tile."""
        return max(1, TILE // self.share)

    @property
    def slots(self) -> int:
        """Return the queries of a tile, and room for the last few to be computed twice."""
        return -(-self.tokens * self.share // ROWS) * ROWS

    @property
    def types(self) -> dict[str, str]:
        """Return memref types by name: `sizes` are the numbers of tokens and of positions; `keys` and `values` the new
        layout, block by block of each key/value head; `sums`, `peaks` (and totals) one tile's, by slot; `weights`
        those of one block for a few slots."""
        return {
            "q": memref((PAGES, self.heads, self.dim), self.kind),
            "pages": self.pages,
            "table": memref((PAGES,), "i32"),
            "sizes": memref((2,), "i64"),
            "keys": memref((PAGES, self.dim // self.each, BLOCK), self.packed),
            "values": memref((PAGES, BLOCK // self.each, self.dim), self.packed),
            "sinks": memref((self.heads,), "f32"),
            "sums": memref((self.slots, self.dim), "f32"),
            "peaks": memref((self.slots,), "f32"),
            "weights": memref((ROWS, BLOCK), "bf16" if self.pairs else "f32"),
        }
