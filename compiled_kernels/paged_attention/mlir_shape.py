"""The shapes that attention kernels are compiled for, and the types of their memory."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import PAGES, Target, divisor, memref


@dataclass(frozen=True, kw_only=True)
class PagedHeads:
    """Query heads on paged key/value heads.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads, each of width `head_dim`.
        page_size: tokens of a page.
        dtype: f32 or bf16, the type of queries and cache.
        scale: scores are q · k * `scale`.
        softcap: c tanh(score / c) unless 0.
        window: positions that a query sees, all where it is 0.
        sinks: first positions that are always seen.
        sink_logits: whether each head has one logit more in its softmax, without a value.
    """

    heads: int
    groups: int
    dim: int
    size: int
    kind: str
    scale: float
    target: Target
    window: int = 0
    sinks: int = 0
    softcap: float = 0.0
    sink_logits: bool = False

    @property
    def share(self) -> int:
        """Return the query heads of a group."""
        return self.heads // self.groups

    @property
    def lanes(self) -> int:
        """Return the scores of a vector."""
        return self.target.lanes

    @property
    def columns(self) -> int:
        """Return the columns of a head that one vector of float32 holds."""
        return divisor(self.dim, self.target.lanes)

    @property
    def pairs(self) -> bool:
        """Return whether sums are dot products of bfloat16 pairs."""
        return self.target.bf16_dots and self.kind == "bf16" and self.dim % 32 == 0

    @property
    def pages(self) -> str:
        """Return the type of the pool of keys, and of that of values: [page, group, offset, dim]."""
        return memref((PAGES, self.groups, self.size, self.dim), self.kind)


HEADS = 4  # query heads whose sums are kept in registers at once


@dataclass(frozen=True, kw_only=True)
class Attention(PagedHeads):
    """`rows` queries, each at the last position of its own context, of `max_pages` pages at most, in `chunks` parts."""

    rows: int
    held: int
    chunks: int = 1

    @property
    def scored(self) -> int:
        """Return the offsets of a page, filled up to whole vectors of scores."""
        return -(-self.size // self.lanes) * self.lanes

    @property
    def types(self) -> dict[str, str]:
        """Return memref types by name: `queries` are those of one key/value head; `partial` holds a chunk's unscaled
        sums, then its peak, then its total."""
        return {
            "q": memref((self.rows, self.heads, self.dim), self.kind),
            "pages": self.pages,
            "table": memref((self.rows, self.held), "i32"),
            "lengths": memref((self.rows,), "i32"),
            "queries": memref((self.share, self.dim), self.kind),
            "scores": memref((HEADS, self.scored), "f32"),
            "weights": memref((HEADS, self.scored), "bf16"),
            "partial": memref((self.rows, self.heads, self.chunks, self.dim + 2), "f32"),
            "mixed": memref((self.rows, self.heads * self.dim), self.kind),
            "sinks": memref((self.heads,), "f32"),
        }
