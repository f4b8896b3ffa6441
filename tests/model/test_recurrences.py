"""Recurrences over chunks of tokens are those token by token, and a sequence's is its own in any batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.thorough import tries
from workbench.model.recurrent.delta_net import CHUNK_TOKENS, delta_rule_by_chunk, delta_rule_by_token
from workbench.model.recurrent.mamba2 import scan_by_chunk, scan_by_token

TOKENS = st.one_of(st.integers(1, 12), st.integers(CHUNK_TOKENS - 1, 2 * CHUNK_TOKENS + 5))
SIZES = st.tuples(TOKENS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))


def draw(seed: int, *sizes: int) -> Tensor:
    return torch.randn(2, *sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(found: Tensor, exact: Tensor, bound: float = 1e-10) -> bool:
    return found.shape == exact.shape and bool((found - exact).abs().max() <= bound * (1 + exact.abs().max()))


def check(by_chunk: Callable, by_token: Callable, inputs: list[Tensor], state: Tensor) -> None:
    """By token, in two halves, and a sequence alone."""
    out, last = by_chunk(*inputs, state)
    assert all(map(near, (out, last), by_token(*inputs, state)))
    if cut := inputs[0].shape[1] // 2:
        first, between = by_chunk(*(each[:, :cut] for each in inputs), state)
        second, after = by_chunk(*(each[:, cut:] for each in inputs), between)
        assert near(torch.cat([first, second], dim=1), out) and near(after, last)
    assert near(by_chunk(*(each[:1] for each in (*inputs, state)))[0], out[:1], 1e-12)


@settings(max_examples=tries(40))
@given(SIZES, st.integers(0, 99), st.floats(0.01, 30))
def test_a_delta_rule_by_chunk_is_that_by_token(sizes: tuple[int, ...], seed: int, rate: float) -> None:
    """With states that forget at once, too, whose logarithms differ by more than float64 can say."""
    tokens, heads, key, value = sizes
    q, k = (torch.nn.functional.normalize(draw(seed + i, tokens, heads, key), dim=-1) for i in range(2))
    v, state = draw(seed + 2, tokens, heads, value), draw(seed + 3, heads, key, value)
    decay, beta = -rate * draw(seed + 4, tokens, heads).abs(), draw(seed + 5, tokens, heads).sigmoid()
    check(delta_rule_by_chunk, delta_rule_by_token, [q, k, v, decay, beta], state)


@settings(max_examples=tries(40))
@given(SIZES, st.integers(0, 99), st.floats(0.01, 30))
def test_a_state_space_scan_by_chunk_is_that_by_token(sizes: tuple[int, ...], seed: int, rate: float) -> None:
    tokens, heads, dim, size = sizes
    x, b, c = (draw(seed + i, tokens, heads, width) for i, width in enumerate((dim, size, size)))
    decay = -rate * draw(seed + 4, tokens, heads).abs()
    check(scan_by_chunk, scan_by_token, [x, decay, b, c], draw(seed + 3, heads, dim, size))
