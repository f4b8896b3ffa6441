"""Kernels with one order of sums, run by `test_triton.py` with TRITON_INTERPRET=1. Unwritten memory is NaN.

The interpreter's matrix product is numpy's, which gives a row other bits at another place of the tile; tensor cores do
not. Here products are summed over the width step by step, for every element alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import Spans
from compiled_kernels.cases import suite_of
from compiled_kernels.linear import triton as products
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix, quantize_matrix
from compiled_kernels.masks import Causal, Mask, SlidingWindow
from compiled_kernels.paged_attention import triton as attention
from compiled_kernels.triton_code.launch import run
from tests.helpers.interpreter import set_up_once_a_launch
from tests.helpers.rows import rows
from tests.thorough import run_seed

__all__ = ["set_up_once_a_launch"]  # a fixture
DTYPES = [torch.float32, torch.bfloat16]


def in_one_order(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    sums = np.zeros((a.shape[0], b.shape[1]), dtype)
    for k in range(a.shape[1]):
        sums += a[:, k : k + 1].astype(dtype) * b[k : k + 1].astype(dtype)
    return sums


@pytest.fixture(autouse=True, scope="module")
def as_on_tensor_cores() -> Iterator[None]:
    numpys = np.matmul
    np.matmul = in_one_order  # type: ignore[assignment]
    torch.use_deterministic_algorithms(True)  # torch.empty and its kin give NaN
    yield
    np.matmul = numpys
    torch.use_deterministic_algorithms(False)


WEIGHTS = {
    "dense": DENSE_MATRIX,
    "int8": INT8_MATRIX,
    "int4": MatrixFormat("int4", 16, torch.float16),
    "int4 with minima": MatrixFormat("int4", 16, torch.float16, torch.float32),
    "int8 by 16": MatrixFormat("int8", 16, torch.float16),
    "fp8": MatrixFormat("fp8", 32),
}


@rows({"weights": list(WEIGHTS), "dtype": DTYPES, "count": [17, 2, 70], "width": [48, 16, 96], "outs": [40, 1],
       "bad": [torch.nan, None, torch.inf]})  # fmt: skip
def test_row_of_a_product_is_the_same_alone(
    weights: str, dtype: torch.dtype, count: int, width: int, outs: int, bad: float | None
) -> None:
    """And near the exact one. A row of NaN beside it spoils nothing."""
    draw, format = torch.Generator().manual_seed(run_seed()), WEIGHTS[weights]
    weight, x = (torch.randn(length, width, generator=draw).to(dtype) for length in (outs, count))
    stored = [weight] if format.is_dense else quantize_matrix(weight, format)
    dense = weight if format.is_dense else dequantize_matrix(format, *stored)
    given: tuple[Any, ...] = (*stored, *[None] * (4 - len(stored)), format.codes, format.group)
    place = run_seed() % count
    if bad is not None:
        x[(place + 1) % count] = bad
    together, alone = (run(*products.plan(each, *given, batch_invariant=True)) for each in (x, x[place : place + 1]))
    assert torch.equal(together[place : place + 1], alone)
    exact = compiled_kernels.linear(x[place : place + 1].double(), dense.double())
    room = (width**0.5 + 4) * torch.finfo(torch.bfloat16 if dtype != torch.float32 else dtype).eps
    assert (alone.double() - exact).abs().max() <= 4 * room * (1 + exact.abs().max())


def last_of(inputs: tuple, mask: Mask, lengths: list[int], **plan: Any) -> Tensor:
    """Return what the first sequence's last query reads after lengths[0] tokens, beside the second's if asked."""
    q, kv, spans, parameters = inputs
    contexts = spans.context_lengths
    ends = [int(contexts[0]), int(contexts.sum())]
    queries = torch.cat([q[end - length : end] for end, length in zip(ends, lengths, strict=False)])
    starts = torch.tensor([0, lengths[0], sum(lengths)][: len(lengths) + 1], dtype=torch.int32)
    count = len(lengths)
    given_ = kv.first(count), Spans(starts, contexts[:count], max(lengths) == 1), parameters._replace(mask=mask)
    return run(*attention.plan(queries, *given_, **plan))[lengths[0] - 1]


def scene(dtype: torch.dtype, contexts: list[int], share: int) -> tuple:
    arguments = {
        "contexts": contexts, "spans": contexts, "num_kv_heads": 2, "queries_per_kv": share, "dim": 24, "size": 16,
        "mask": Causal(), "sinks": True, "dtype": dtype,
    }  # fmt: skip
    return suite_of("paged_attention").input_maker(torch.Generator().manual_seed(run_seed()), **arguments)


@rows(
    {
        "context": [17, 1, 16, 150], "span": [5, 16, 17], "other": [30, 1], "share": [3, 1], "dtype": DTYPES,
        "mask": [Causal(), SlidingWindow(1), SlidingWindow(40, num_sink_tokens=9)],
    }
)  # fmt: skip
def test_token_is_the_same_in_every_span(
    context: int, span: int, other: int, share: int, dtype: torch.dtype, mask: Mask
) -> None:
    """As a decode, at the end of a chunk, in one chunk with all before it; alone, and beside another sequence."""
    inputs, span = scene(dtype, [context, other], share), min(span, context)
    decoded = last_of(inputs, mask, [1], batch_invariant=True)
    for lengths in ([span], [context], [1, 1], [span, other], [1, other]):
        assert torch.equal(last_of(inputs, mask, lengths, batch_invariant=True), decoded), lengths


def test_without_it_a_decode_has_other_bits_than_a_chunk() -> None:
    """The negative control: a long decode is walked in parts."""
    inputs = scene(torch.float32, [400, 5], 3)
    assert not torch.equal(last_of(inputs, Causal(), [1]), last_of(inputs, Causal(), [400]))
    decoded = last_of(inputs, Causal(), [1], batch_invariant=True)
    assert torch.equal(last_of(inputs, Causal(), [400], batch_invariant=True), decoded)


@rows({"count": [17, 2, 16, 70], "named": [3, 1]})
def test_row_of_an_expert_is_the_same_whichever_others_there_are(count: int, named: int) -> None:
    """Alone and in any tile, beside rows that are no numbers; experts that no row names are NaN."""
    generator = torch.Generator().manual_seed(run_seed())
    weight, expert = torch.randn(4, 40, 48, generator=generator), torch.randint(named, (count,), generator=generator)
    weight[[each for each in range(4) if each not in expert]] = torch.nan
    x, place = torch.randn(count, 48, generator=generator), run_seed() % count
    alone = compiled_kernels.expert_linear(x[[place]], expert[[place]], weight, backend=Backend.TRITON)
    bad = (place - 1) % count
    x[bad] = torch.nan
    among = compiled_kernels.expert_linear(x, expert, weight, backend=Backend.TRITON)
    assert torch.equal(among[[place]], alone)
    assert among[torch.arange(count) != bad].isfinite().all()
