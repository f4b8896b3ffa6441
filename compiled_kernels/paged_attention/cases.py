from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels.attention import AttentionParameters, Spans, attention_reference
from compiled_kernels.cases import Case, CaseCost, Suite, in_float64, random_normal
from compiled_kernels.masks import ALiBi, AndMask, Causal, HeadMask, Mask, SlidingWindow
from compiled_kernels.paged_attention.api import PagedKV


def inputs(
    generator: torch.Generator,
    contexts: Sequence[int],
    spans: Sequence[int],
    num_kv_heads: int,
    queries_per_kv: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
    mask: Mask = Causal(),  # noqa: B008 (a frozen value)
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    sigmoid: bool = False,
    selected: float = 1.0,
    beyond: int = 0,
) -> tuple:
    """Draw spans over pages in random order. All memory outside of contexts is NaN: the null page, which replaces pages
    that a window has left behind, and `beyond` rows of q after the last span. If `selected` is below 1, each query
    reads that fraction of the pages for each key/value head, and its own page."""
    held, heads = [-(-context // size) for context in contexts], num_kv_heads * queries_per_kv
    table, step = page_table(generator, held), spans_of(contexts, spans)
    keys, values = (torch.full((sum(held) + 1, num_kv_heads, size, dim), torch.nan, dtype=dtype) for _ in range(2))
    for seq, context in enumerate(contexts):
        for page in range(held[seq]):
            number, filled = int(table[seq, page]), min(size, context - page * size)
            for pages in (keys, values):
                pages[number, :, :filled] = random_normal(generator, dtype, (num_kv_heads, filled, dim))
        if isinstance(mask, SlidingWindow):
            reach = max(0, context - spans[seq] - mask.sliding_window + 1)
            table[seq, -(-mask.num_sink_tokens // size) : reach // size] = 0
    q = random_normal(generator, dtype, (sum(spans) + beyond, heads, dim))
    q[sum(spans) :] = torch.nan
    sink_logits = random_normal(generator, torch.float32, (heads,)) if sinks else None
    score = ALiBi(heads) if alibi else Sigmoid() if sigmoid else None
    kv = PagedKV(keys, values, table)
    if selected < 1:
        chosen = torch.rand(len(q), num_kv_heads, table.shape[1], generator=generator) < selected
        for _, rows, context in step.listed():
            own = torch.arange(context - (rows.stop - rows.start), context) // size
            chosen[torch.arange(rows.start, rows.stop), :, own] = True
        kv = kv._replace(chosen=chosen)
    return q, kv, step, AttentionParameters(dim**-0.5, mask, softcap, sink_logits, score)


def page_table(generator: torch.Generator, held: Sequence[int]) -> Tensor:
    """Draw a table of page numbers in random order; sequence s has `held[s]` pages."""
    order = (torch.randperm(sum(held), generator=generator) + 1).int().split(list(held))
    table = torch.zeros(len(held), max(2, *held, 2), dtype=torch.int32)
    for row, pages in zip(table, order, strict=True):
        row[: len(pages)] = pages
    return table


def spans_of(contexts: Sequence[int], spans: Sequence[int]) -> Spans:
    starts = torch.tensor([0, *spans], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Spans(starts, torch.tensor(contexts, dtype=torch.int32), all(span == 1 for span in spans))


@dataclass(frozen=True)
class Sigmoid:
    """A score function that computes weights itself, without a softmax: sigmoid(score - 1)."""

    normalized = False

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return -torch.log1p(torch.exp(1 - score))


def later_for_later_heads(query: Tensor, key: Tensor, head: Tensor) -> Tensor:
    """Show each head another part of the earlier positions: a mask that differs by head."""
    return (query - key >= 2 * head) | (key % 4 == head % 4)


def even(query: Tensor, key: Tensor) -> Tensor:
    """Show every other key: a mask that backends have no special code for."""
    return key % 2 == 0


def case(
    name: str, contexts: Sequence[int], spans: Sequence[int], dtype: torch.dtype, timed: bool = False, /, **more: Any
) -> Case:
    shape = {"num_kv_heads": 3, "queries_per_kv": 3, "dim": 64, "size": 64, **more}
    seen = [_seen(span, context, shape.get("mask", Causal())) for span, context in zip(spans, contexts, strict=True)]
    rows = 2 * sum(read for read, _ in seen) * shape["num_kv_heads"] * shape["dim"] * dtype.itemsize
    heads = shape["num_kv_heads"] * shape["queries_per_kv"]
    pairs = sum(looks for _, looks in seen)
    moved = rows + 2 * sum(spans) * heads * shape["dim"] * dtype.itemsize
    arguments = {"contexts": tuple(contexts), "spans": tuple(spans), "dtype": dtype, **shape}
    return Case(name, arguments, CaseCost(moved, 4 * pairs * heads * shape["dim"]), timed)


def _seen(span: int, context: int, mask: Mask) -> tuple[int, int]:
    """Return positions that any query of a span sees, and pairs of query and position that see each other."""
    allowed = mask(torch.arange(context - span, context)[:, None], torch.arange(context)[None])
    return int(allowed.any(0).sum()), int(allowed.sum())


def terms(contexts: Sequence[int], dim: int, **_: object) -> float:
    # A score's rounding error is carried through the exponential: scores up to about 8, each a sum over dim.
    return 8 * math.sqrt(dim) + math.sqrt(max(contexts)) + 8


def size(*inputs: Any) -> Tensor:
    """Return, for each output, the sum of the absolute values that are added, so that the error bound is fair if a sum
    happens to cancel.
    """
    q, kv, spans, parameters = in_float64(inputs)
    return attention_reference(q, kv._replace(values=kv.values.abs()), spans, parameters).amax(-1, keepdim=True)


def _cases():
    small: dict[str, Any] = {"num_kv_heads": 2, "dim": 8, "size": 4}
    for dtype in (torch.float32, torch.bfloat16):
        yield case("decode 1 at 128", (128,), (1,), dtype, True)
        yield case("decode 1 at 4096", (4096,), (1,), dtype, True)
        yield case("decode 16 at 512", (512,) * 16, (1,) * 16, dtype, True)
        yield case("decode 3 ragged", (1, 65, 200), (1, 1, 1), dtype, size=16)
        yield case("prefill 512", (512,), (512,), dtype, True)
        yield case("chunk 128 at 640", (640,), (128,), dtype)
        yield case("mixed", (9, 30, 17, 5), (1, 1, 17, 3), dtype, **small)
        yield case("rows of no span", (9, 30), (1, 17), dtype, beyond=3, **small)
        yield case("one head a group", (9, 4), (1, 4), dtype, **small | {"queries_per_kv": 1})
        yield case("decode window", (40, 3, 7), (1, 1, 1), dtype, mask=SlidingWindow(7), **small)
        yield case("span past a window", (200,), (100,), dtype, mask=SlidingWindow(40), **small)
        yield case("mixed window and sinks", (40, 9), (1, 6), dtype, mask=SlidingWindow(5, num_sink_tokens=2), **small)
        yield case("decode soft-cap", (33,), (1,), dtype, softcap=2.0, **small)
        yield case("mixed soft-cap and sink logits", (33, 8), (1, 8), dtype, softcap=3.0, sinks=True, **small)
        yield case("decode own mask", (33, 4), (1, 1), dtype, mask=AndMask(Causal(), even), **small)
        by_head = AndMask(Causal(), HeadMask(later_for_later_heads, 6))
        yield case("decode mask by head", (33, 4), (1, 1), dtype, mask=by_head, **small)
        yield case("mixed mask by head", (33, 8), (1, 8), dtype, mask=by_head, **small)
        yield case("decode sigmoid", (33, 4), (1, 1), dtype, sigmoid=True, **small)
        yield case("mixed sigmoid", (33, 8), (1, 8), dtype, sigmoid=True, **small)
        yield case("decode chosen pages", (33, 4), (1, 1), dtype, selected=0.5, **small)
        yield case("mixed chosen pages", (33, 8), (1, 8), dtype, selected=0.5, **small)
        yield case("decode ALiBi", (33, 4), (1, 1), dtype, alibi=True, sinks=True, **small)
        yield case("mixed ALiBi", (33, 8), (1, 8), dtype, alibi=True, sinks=True, **small)
        yield case("decode sink logits", (33, 1), (1, 1), dtype, sinks=True, **small)


SUITES = (Suite("paged_attention", inputs, compiled_kernels.paged_attention, tuple(_cases()), terms, scale=size),)
