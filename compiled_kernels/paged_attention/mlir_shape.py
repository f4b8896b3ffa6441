"""The shapes that attention kernels are compiled for, decode and span, and the types of their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters
from compiled_kernels.backends import Backend
from compiled_kernels.builder.target import MLIR_TYPES, SIZE_BOUND, Target, largest_divisor, memref

HEADS_TOGETHER = 4  # query heads whose sums are kept in registers at once
BLOCK_POSITIONS = 64  # positions
QUERIES_TOGETHER = 4  # queries whose sums are in registers at once
TILE_QUERIES = 64  # queries (tokens times heads) that walk the context together
ROWS_BOUND = 1 << 20  # rows: a bound for types only
SIZES = "memref<4xi64>"  # of queries, of a span's positions, of pages in a line of each table
MIN_ITEMS_PER_THREAD = 8  # with fewer rows times groups a thread, the context is split too


def num_chunks(rows: int, num_kv_heads: int) -> int:
    """Return the parts into which contexts are split, so that every thread has work."""
    threads = torch.get_num_threads()
    return threads if rows * num_kv_heads < MIN_ITEMS_PER_THREAD * threads else 1


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A layer's heads, and what its attention is compiled for.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads, each of width `head_dim`.
        scale: scores are q · k * `scale`.
        softcap: c tanh(score / c) unless 0.
        sliding_window: positions that a query sees, all where it is 0.
        num_sink_tokens: first positions that are always seen.
        sink_logits: whether each head has one logit more in its softmax, without a value.
        mask: text of a program (see `scalar_code`) that gives of (query, key, head) whether a key is seen, or empty.
        score: text of one that gives of (score, head, query, key) what is put in the score's place, or empty.
        normalized: whether weights are divided by their sum; else they are exp(score).
        selected: whether each query reads chosen pages only (see `page_selection`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int = 0
    num_sink_tokens: int = 0
    softcap: float = 0.0
    sink_logits: bool = False
    mask: str = ""
    score: str = ""
    normalized: bool = True
    selected: bool = False

    @property
    def skips_pages(self) -> bool:
        """Return whether some pages of a context may be passed over."""
        return bool(self.mask) or self.selected

    @property
    def queries_per_kv(self) -> int:
        """Return the query heads of a group."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class PagedHeads(HeadShape):
    """Query heads on key/value heads in pages of `page_size` tokens; `dtype` (f32 or bf16) is the type of queries and
    cache."""

    page_size: int
    dtype: str
    target: Target

    @classmethod
    def from_tensors(
        cls, operator: str, q: Tensor, pages: Tensor, parameters: AttentionParameters, **more: Any
    ) -> Self:
        """Return the shape for queries [token, head, dim] over pages [page, kv_head, offset, dim]. Raises BackendError
        for masks and scores that cannot be traced."""
        rules = parameters.kernel_rules(operator, Backend.MLIR)._asdict()
        if issubclass(cls, DecodeAttention):
            more["chunks"] = num_chunks(len(q), pages.shape[1])
        sink_logits = parameters.sink_logits is not None
        scored = {"scale": parameters.scale, "softcap": parameters.softcap, "sink_logits": sink_logits}
        return cls(
            num_heads=q.shape[1], num_kv_heads=pages.shape[1], head_dim=q.shape[2], page_size=pages.shape[2],
            dtype=MLIR_TYPES[q.dtype], target=Target.current(), **rules, **scored, **more,
        )  # fmt: skip

    @property
    def lanes(self) -> int:
        """Return the scores of a vector."""
        return self.target.lanes

    @property
    def columns(self) -> int:
        """Return the columns of a head that one vector of float32 holds."""
        return largest_divisor(self.head_dim, self.target.lanes)

    @property
    def uses_bf16_pairs(self) -> bool:
        """Return whether sums are dot products of bfloat16 pairs."""
        return self.target.has_bf16_dot and self.dtype == "bf16" and self.head_dim % 32 == 0

    @property
    def pages(self) -> str:
        """Return the type of the pool of keys, and of that of values: [page, group, offset, dim]."""
        return memref((SIZE_BOUND, self.num_kv_heads, self.page_size, self.head_dim), self.dtype)


@dataclass(frozen=True, kw_only=True)
class DecodeAttention(PagedHeads):
    """`rows` queries, each at the last position of its own context, of `max_pages` pages at most, in `chunks` parts."""

    rows: int = ROWS_BOUND
    max_pages: int = ROWS_BOUND
    chunks: int = 1

    @property
    def padded_page_size(self) -> int:
        """Return the offsets of a page, filled up to whole vectors of scores."""
        return -(-self.page_size // self.lanes) * self.lanes

    @property
    def flat_type(self) -> str:
        """Return the type of a page table row after row."""
        return memref((min(SIZE_BOUND, self.rows * self.max_pages),), "i32")

    @property
    def types(self) -> dict[str, str]:
        """Return memref types by name: `queries` are those of one key/value head; `partial` holds a chunk's unscaled
        sums, then its peak, then its total; `chosen` says which pages of a row's table its queries of one key/value
        head read."""
        return {
            "q": memref((self.rows, self.num_heads, self.head_dim), self.dtype),
            "table": memref((self.rows, self.max_pages), "i32"),
            "lengths": memref((self.rows,), "i32"),
            "queries": memref((self.queries_per_kv, self.head_dim), self.dtype),
            "scores": memref((HEADS_TOGETHER, self.padded_page_size), "f32"),
            "weights": memref((HEADS_TOGETHER, self.padded_page_size), "bf16"),
            "partial": memref((self.rows, self.num_heads, self.chunks, self.head_dim + 2), "f32"),
            "mixed": memref((self.rows, self.num_heads * self.head_dim), self.dtype),
            "sinks": memref((self.num_heads,), "f32"),
            "chosen": memref((self.max_pages,), "i8"),
        }


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
    def flat_type(self) -> str:
        """Return the type of a page table."""
        return memref((SIZE_BOUND,), "i32")

    @property
    def types(self) -> dict[str, str]:
        """Return memref types by name: `chosen` says which pages each token reads for each key/value head, one after
        another; `keys` and `values` are the new layout, block by block of each key/value head, of each kind of pages;
        `found` is what each slot of a tile has found, in whole cache lines (of 8, 16, 32 and 64 columns of padding the
        last alone never cost time, on Zen 3); `weights` are those of one block for a few slots."""
        return {
            "q": memref((SIZE_BOUND, self.num_heads, self.head_dim), self.dtype),
            "chosen": memref((SIZE_BOUND,), "i8"),
            "keys": memref((SIZE_BOUND, self.head_dim // self.values_per_element, BLOCK_POSITIONS), self.element_type),
            "values": memref(
                (SIZE_BOUND, BLOCK_POSITIONS // self.values_per_element, self.head_dim), self.element_type
            ),
            "sinks": memref((self.num_heads,), "f32"),
            "found": memref((self.tile_slots, self.head_dim + 64), "f32"),
            "weights": memref((QUERIES_TOGETHER, BLOCK_POSITIONS), "bf16" if self.uses_bf16_pairs else "f32"),
        }
