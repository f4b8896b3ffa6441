"""The shape that attention of one long span is compiled for, and the types of its memory."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import SIZE_BOUND, memref
from compiled_kernels.paged_attention.mlir_shape import PagedHeads

BLOCK_POSITIONS = 64  # positions
QUERIES_TOGETHER = 4  # queries whose sums are in registers at once
TILE_QUERIES = 64  # queries (tokens times heads) that walk the context together


@dataclass(frozen=True, kw_only=True)
class SpanAttention(PagedHeads):
    """Attention of one span: how many tokens there are, and how long the context, is not compiled in.

    In the new layout of keys and values an element is a float32 number or, with `pairs`, two of bfloat16 in an i32.
    """

    @property
    def element_type(self) -> str:
        """Return the type of an element of the new layout."""
        return "i32" if self.uses_bf16_pairs else "f32"

    @property
    def values_per_element(self) -> int:
        """Return the numbers an element holds."""
        return 2 if self.uses_bf16_pairs else 1

    @property
    def tile_tokens(self) -> int:
        """Return the tokens of a tile."""
        return max(1, TILE_QUERIES // self.queries_per_kv)

    @property
    def tile_slots(self) -> int:
        """Return the queries of a tile, and room for the last few to be computed twice."""
        return -(-self.tile_tokens * self.queries_per_kv // QUERIES_TOGETHER) * QUERIES_TOGETHER

    @property
    def types(self) -> dict[str, str]:
        """Return memref types by name: `sizes` are the numbers of tokens and of positions; `keys` and `values` the new
        layout, block by block of each key/value head; `sums`, `peaks` (and totals) one tile's, by slot; `weights`
        those of one block for a few slots."""
        return {
            "q": memref((SIZE_BOUND, self.num_heads, self.head_dim), self.dtype),
            "pages": self.pages,
            "table": memref((SIZE_BOUND,), "i32"),
            "sizes": memref((2,), "i64"),
            "keys": memref((SIZE_BOUND, self.head_dim // self.values_per_element, BLOCK_POSITIONS), self.element_type),
            "values": memref((SIZE_BOUND, BLOCK_POSITIONS // self.values_per_element, self.head_dim), self.element_type),
            "sinks": memref((self.num_heads,), "f32"),
            "sums": memref((self.tile_slots, self.head_dim), "f32"),
            "peaks": memref((self.tile_slots,), "f32"),
            "weights": memref((QUERIES_TOGETHER, BLOCK_POSITIONS), "bf16" if self.uses_bf16_pairs else "f32"),
        }
