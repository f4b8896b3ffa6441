"""What the attention kernels are compiled for, and the types of what they work on."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import PAGES, Target, divisor, memref


@dataclass(frozen=True, kw_only=True)
class PagedHeads:
    """`heads` query heads on `groups` key/value heads of width `dim`, whose pages hold `size` tokens each.

    `kind` (f32 or bf16) is the type of queries and cache. Scores are q · k * `scale`, capped by `softcap` unless that
    is 0. A query sees the last `window` positions, all where that is 0, and the first `sinks`. With `sink_logits` each
    head has one logit more in its softmax, which stands for no value.
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
        """Query heads of a group."""
        return self.heads // self.groups

    @property
    def lanes(self) -> int:
        """Scores of a vector."""
        return self.target.lanes

    @property
    def columns(self) -> int:
        """Columns of a head that one vector of float32 holds."""
        return divisor(self.dim, self.target.lanes)

    @property
    def pairs(self) -> bool:
        """Whether sums are dot products of bfloat16 pairs."""
        return self.target.bf16_dots and self.kind == "bf16" and self.dim % 32 == 0

    @property
    def pages(self) -> str:
        """Type of the pool of keys, and of that of values: [page, group, offset, dim]."""
        return memref((PAGES, self.groups, self.size, self.dim), self.kind)


HEADS = 4  # query heads whose sums are kept in registers at once


@dataclass(frozen=True, kw_only=True)
class Attention(PagedHeads):
    """`rows` queries, each at the last position of its own context, of `held` pages at most, in `chunks` parts."""

    rows: int
    held: int
    chunks: int = 1

    @property
    def scored(self) -> int:
        """Offsets of a page, filled up to whole vectors of scores."""
        return -(-self.size // self.lanes) * self.lanes

    @property
    def types(self) -> dict[str, str]:
        """`queries` are those of one group; `partial` holds a chunk's unscaled sums, then its peak, then its total."""
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
