"""Recurrences over chunks of tokens are those token by token, and a sequence's is its own in any batch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.thorough import tries
from workbench.model.delta_net import CHUNK_TOKENS, delta_rule_by_chunk, delta_rule_by_token
from workbench.model.mamba2 import scan_by_chunk, scan_by_token

TOKENS = st.one_of(st.integers(1, 12), st.integers(CHUNK_TOKENS - 1, 2 * CHUNK_TOKENS + 5))


def draw(*sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=tries(40), deadline=None)
@given(TOKENS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(0, 99), st.floats(0.01, 30))
def test_a_delta_rule_by_chunk_is_that_by_token(tokens, heads, key, value, seed, rate) -> None:
    """With states that forget at once, too, whose logarithms differ by more than float64 can say."""
    q, k = (torch.nn.functional.normalize(draw(2, tokens, heads, key, seed=seed + i), dim=-1) for i in range(2))
    v, state = draw(2, tokens, heads, value, seed=seed + 2), draw(2, heads, key, value, seed=seed + 3)
    decay, beta = -rate * draw(2, tokens, heads, seed=seed + 4).abs(), draw(2, tokens, heads, seed=seed + 5).sigmoid()
    found = delta_rule_by_chunk(q, k, v, decay, beta, state)
    for mine, exact in zip(found, delta_rule_by_token(q, k, v, decay, beta, state), strict=True):
        assert mine.shape == exact.shape and (mine - exact).abs().max() <= 1e-10 * (1 + exact.abs().max())
    cut = tokens // 2
    if cut:
        halves = [part.split([cut, tokens - cut], dim=1) for part in (q, k, v, decay, beta)]
        (q0, q1), (k0, k1), (v0, v1), (d0, d1), (b0, b1) = halves
        first, between = delta_rule_by_chunk(q0, k0, v0, d0, b0, state)
        second, after = delta_rule_by_chunk(q1, k1, v1, d1, b1, between)
        assert (torch.cat([first, second], dim=1) - found[0]).abs().max() <= 1e-10 * (1 + found[0].abs().max())
        assert (after - found[1]).abs().max() <= 1e-10 * (1 + found[1].abs().max())
    alone = delta_rule_by_chunk(q[:1], k[:1], v[:1], decay[:1], beta[:1], state[:1])
    assert (alone[0] - found[0][:1]).abs().max() <= 1e-12 * (1 + found[0].abs().max())


@settings(max_examples=tries(40), deadline=None)
@given(
    st.integers(1, 150),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 99),
    st.floats(0.01, 30),
)
def test_a_state_space_scan_by_chunk_is_that_by_token(tokens, heads, dim, size, seed, rate) -> None:
    x, b, c = (draw(2, tokens, heads, width, seed=seed + i) for i, width in enumerate((dim, size, size)))
    state, decay = draw(2, heads, dim, size, seed=seed + 3), -rate * draw(2, tokens, heads, seed=seed + 4).abs()
    found = scan_by_chunk(x, decay, b, c, state)
    for mine, exact in zip(found, scan_by_token(x, decay, b, c, state), strict=True):
        assert mine.shape == exact.shape and (mine - exact).abs().max() <= 1e-10 * (1 + exact.abs().max())
    alone = scan_by_chunk(x[:1], decay[:1], b[:1], c[:1], state[:1])
    assert (alone[0] - found[0][:1]).abs().max() <= 1e-12 * (1 + found[0].abs().max())
