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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import Spans
from compiled_kernels.linear import triton as products
from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import dequantize_int8, dequantize_matrix, quantize_int8, quantize_matrix
from compiled_kernels.masks import Causal, Mask, SlidingWindow
from compiled_kernels.paged_attention import triton as attention
from compiled_kernels.triton_code.launch import run
from tests.compiled_kernels.interpreter import set_up_once_a_launch
from tests.compiled_kernels.test_operators import DTYPES, SUITES, seeds
from tests.thorough import tries

__all__ = ["set_up_once_a_launch"]  # a fixture


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


GROUPED = [
    MatrixFormat("int4", 16, torch.float16),
    MatrixFormat("int4", 16, torch.float16, torch.float32),
    MatrixFormat("int8", 16, torch.float16),
    MatrixFormat("fp8", 32),
]


@settings(max_examples=tries(10), deadline=None)
@given(
    seed=seeds, bits=st.sampled_from([0, 8, *GROUPED]), dtype=DTYPES, rows=st.integers(2, 70), place=st.integers(0, 69),
    width=st.sampled_from([16, 48, 96]), outs=st.integers(1, 40), bad=st.sampled_from([None, torch.nan, torch.inf]),
)  # fmt: skip
def test_a_row_of_a_product_is_the_same_alone(
    seed: int,
    bits: int | MatrixFormat,
    dtype: torch.dtype,
    rows: int,
    place: int,
    width: int,
    outs: int,
    bad: float | None,
) -> None:
    """And near the exact one. A row of NaN beside it spoils nothing."""
    draw = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outs, width, generator=draw).to(dtype), torch.randn(rows, width, generator=draw).to(dtype)
    dense, weights, scales, rest = weight, weight, None, []
    if bits == 8:
        weights, scales = quantize_int8(weight)
        dense = dequantize_int8(weights, scales)
    if isinstance(bits, MatrixFormat):
        weights, scales, *minima = quantize_matrix(weight, bits)
        dense, rest = dequantize_matrix(bits, weights, scales, *minima), [*(minima or [None]), bits.group]
    place %= rows
    if bad is not None:
        x[(place + 1) % rows] = bad
    together, alone = (
        run(*products.plan_batch_invariant(each, weights, scales, None, *rest)) for each in (x, x[place : place + 1])
    )
    assert torch.equal(together[place : place + 1], alone)
    exact = compiled_kernels.linear(x[place : place + 1].double(), dense.double())
    room = (width**0.5 + 4) * torch.finfo(torch.bfloat16 if dtype != torch.float32 else dtype).eps
    assert (alone.double() - exact).abs().max() <= 4 * room * (1 + exact.abs().max())


MASKS = st.one_of(st.just(Causal()), st.builds(SlidingWindow, st.integers(1, 40), st.integers(0, 9)))


def last_of(inputs: tuple, mask: Mask, lengths: list[int], **plan: Any) -> Tensor:
    """Return what the first sequence's last query reads after lengths[0] tokens, beside the second's if asked."""
    q, kv, spans, parameters = inputs
    contexts = spans.context_lengths
    ends = [int(contexts[0]), int(contexts.sum())]
    rows = torch.cat([q[end - length : end] for end, length in zip(ends, lengths, strict=False)])
    starts = torch.tensor([0, lengths[0], sum(lengths)][: len(lengths) + 1], dtype=torch.int32)
    count = len(lengths)
    given_ = kv.first(count), Spans(starts, contexts[:count], max(lengths) == 1), parameters._replace(mask=mask)
    return run(*attention.plan(rows, *given_, **plan))[lengths[0] - 1]


def scene(seed: int, dtype: torch.dtype, contexts: list[int], share: int) -> tuple:
    arguments = {
        "contexts": contexts, "spans": contexts, "num_kv_heads": 2, "queries_per_kv": share, "dim": 24, "size": 16,
        "mask": Causal(), "softcap": 0.0, "sinks": True, "alibi": False, "dtype": dtype,
    }  # fmt: skip
    return SUITES["paged_attention"].input_maker(torch.Generator().manual_seed(seed), **arguments)


@settings(max_examples=tries(12), deadline=None)
@given(
    seed=seeds, dtype=DTYPES, context=st.integers(1, 150), other=st.integers(1, 30), share=st.integers(1, 3),
    mask=MASKS, share_of_span=st.floats(0, 1),
)  # fmt: skip
def test_a_token_is_the_same_in_every_span(
    seed: int, dtype: torch.dtype, context: int, other: int, share: int, mask: Mask, share_of_span: float
) -> None:
    """As a decode, at the end of a chunk, in one chunk with all before it; alone, and beside another sequence."""
    inputs, span = scene(seed, dtype, [context, other], share), 1 + int(share_of_span * (context - 1))
    decoded = last_of(inputs, mask, [1], batch_invariant=True)
    for lengths in ([span], [context], [1, 1], [span, other], [1, other]):
        assert torch.equal(last_of(inputs, mask, lengths, batch_invariant=True), decoded), lengths


def test_without_it_a_decode_has_other_bits_than_a_chunk() -> None:
    """The negative control: a long decode is walked in parts."""
    inputs = scene(0, torch.float32, [400, 5], 3)
    assert not torch.equal(last_of(inputs, Causal(), [1]), last_of(inputs, Causal(), [400]))
    decoded = last_of(inputs, Causal(), [1], batch_invariant=True)
    assert torch.equal(last_of(inputs, Causal(), [400], batch_invariant=True), decoded)


@settings(max_examples=tries(8), deadline=None)
@given(experts=st.lists(st.integers(0, 3), min_size=2, max_size=70), place=st.integers(0, 69))
def test_a_row_of_an_expert_is_the_same_whichever_others_there_are(experts: list[int], place: int) -> None:
    """Alone and in any tile, beside rows that are no numbers; experts that no row names are NaN."""
    generator = torch.Generator().manual_seed(len(experts))
    weight = torch.randn(4, 40, 48, generator=generator)
    weight[[each for each in range(4) if each not in experts]] = torch.nan
    x, expert, place = torch.randn(len(experts), 48, generator=generator), torch.tensor(experts), place % len(experts)
    alone = compiled_kernels.expert_linear(x[[place]], expert[[place]], weight, None, None, Backend.TRITON)
    bad = (place - 1) % len(experts)
    x[bad] = torch.nan
    among = compiled_kernels.expert_linear(x, expert, weight, None, None, Backend.TRITON)
    assert torch.equal(among[[place]], alone)
    assert among[torch.arange(len(experts)) != bad].isfinite().all()
