"""Define the shapes that decode and span attention kernels are compiled for, and the types of their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters
from compiled_kernels.backends import Backend
from compiled_kernels.builder.target import MLIR_TYPES, SIZE_BOUND, Target, largest_divisor, memref

HEADS_TOGETHER = 4  # query heads with sums in registers at once
BLOCK_POSITIONS = 64  # positions
QUERIES_TOGETHER = 4  # queries with sums in registers at once
TILE_QUERIES = 64  # queries (tokens times heads) that walk the context together
ROWS_BOUND = 1 << 20  # rows: a bound for types only
SIZES = "memref<4xi64>"  # numbers of queries, of a span's positions, and of pages in a line of each table
MIN_ITEMS_PER_THREAD = 8  # with fewer (row, group) pairs a thread, the context is split too


def num_chunks(rows: int, num_kv_heads: int) -> int:
    """Return the number of chunks into which contexts are split, so that every thread has work."""
    threads = torch.get_num_threads()
    return threads if rows * num_kv_heads < MIN_ITEMS_PER_THREAD * threads else 1


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A layer's heads and attention rules, as compiled into a kernel.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads, each of width `head_dim`.
        scale: scores are q · k * `scale`.
        softcap: c tanh(score / c); 0 for none.
        sliding_window: positions that a query sees; 0 for all.
        num_sink_tokens: first positions that are always seen.
        sink_logits: whether each head has an additional logit in its softmax, without a value.
        mask: text of a program (see `scalar_code`) from (query, key, head) to whether the key is seen, or empty.
        score: text of a program from (score, head, query, key) to the new score, or empty.
        normalized: whether weights are divided by their sum; otherwise they are exp(score).
        selected: whether each query reads selected pages only (see `page_selection`).
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
        """Return whether kernels may skip some pages of a context."""
        return bool(self.mask) or self.selected

    @property
    def queries_per_kv(self) -> int:
        """Return the number of query heads for each key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class PagedHeads(HeadShape):
    """The heads of attention over pages of `page_size` tokens; `dtype` (f32 or bf16) is the type of queries and
    cache.
    """

    page_size: int
    dtype: str
    target: Target

    @classmethod
    def from_tensors(
        cls, operator: str, q: Tensor, pages: Tensor, parameters: AttentionParameters, **more: Any
    ) -> Self:
        """Return the shape of attention with queries [token, head, dim] over pages [page, kv_head, offset, dim]. Raises
        BackendError for masks and scores that cannot be traced."""
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
        """Return the number of scores in a vector."""
        return self.target.lanes

    @property
    def columns(self) -> int:
        """Return the number of columns of a head in one vector of float32."""
        return largest_divisor(self.head_dim, self.target.lanes)

    @property
    def uses_bf16_pairs(self) -> bool:
        """Return whether sums are dot products of bfloat16 pairs."""
        return self.target.has_bf16_dot and self.dtype == "bf16" and self.head_dim % 32 == 0

    @property
    def pages(self) -> str:
        """Return the memref type of the pool of keys, and of values: [page, group, offset, dim]."""
        return memref((SIZE_BOUND, self.num_kv_heads, self.page_size, self.head_dim), self.dtype)


@dataclass(frozen=True, kw_only=True)
class DecodeAttention(PagedHeads):
    """Attention of `rows` queries, each at the last position of its own context of up to `max_pages` pages; contexts
    are split into `chunks` parts.
    """

    rows: int = ROWS_BOUND
    max_pages: int = ROWS_BOUND
    chunks: int = 1

    @property
    def padded_page_size(self) -> int:
        """Return the page size in tokens, rounded up to whole vectors of scores."""
        return -(-self.page_size // self.lanes) * self.lanes

    @property
    def flat_type(self) -> str:
        """Return the memref type of a page table that is stored row after row."""
        return memref((min(SIZE_BOUND, self.rows * self.max_pages),), "i32")

    @property
    def types(self) -> dict[str, str]:
        """Return memref types by argument name: `queries` are the queries of one key/value head; `partial` holds a
        chunk's weighted values, not yet divided, its largest logit and its sum of weights; `chosen` has the selected
        pages of a row's table for one key/value head.
        """
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
    """Attention of one span; the number of tokens and the length of the context are not compiled in.

    Keys and values are repacked: an element is a float32 number or, with `pairs`, two bfloat16 numbers in an i32.
    """

    @property
    def element_type(self) -> str:
        """Return the type of an element of the repacked keys and values."""
        return "i32" if self.uses_bf16_pairs else "f32"

    @property
    def values_per_element(self) -> int:
        """Return the number of values in an element of the repacked keys and values."""
        return 2 if self.uses_bf16_pairs else 1

    @property
    def tile_tokens(self) -> int:
        """Return the number of tokens in a tile."""
        return max(1, TILE_QUERIES // self.queries_per_kv)

    @property
    def tile_slots(self) -> int:
        """Return the number of queries in a tile, padded so that the last queries can be computed twice."""
        return -(-self.tile_tokens * self.queries_per_kv // QUERIES_TOGETHER) * QUERIES_TOGETHER

    @property
    def flat_type(self) -> str:
        """Return the memref type of a page table."""
        return memref((SIZE_BOUND,), "i32")

    @property
    def types(self) -> dict[str, str]:
        """Return memref types by argument name: `chosen` has the selected pages of each token and key/value head, one
        after another; `keys` and `values` are the repacked blocks, by key/value head and kind of pages; `found` is the
        running softmax's state for each query of a tile, padded to whole cache lines; `weights` are the weights of one
        block for a few queries. (Of 8, 16, 32 and 64 columns of padding only the last never cost time, on Zen 3.)"""
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
