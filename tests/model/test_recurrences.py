"""Recurrences over chunks of tokens are those token by token, and a sequence's is its own in any batch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.thorough import tries
from workbench.model.delta_net import CHUNK_TOKENS, delta_rule_by_chunk, delta_rule_by_token

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
        first, between = delta_rule_by_chunk(*(half[0] for half in halves), state)
        second, after = delta_rule_by_chunk(*(half[1] for half in halves), between)
        assert (torch.cat([first, second], dim=1) - found[0]).abs().max() <= 1e-10 * (1 + found[0].abs().max())
        assert (after - found[1]).abs().max() <= 1e-10 * (1 + found[1].abs().max())
    alone = delta_rule_by_chunk(*(part[:1] for part in (q, k, v, decay, beta, state)))
    assert (alone[0] - found[0][:1]).abs().max() <= 1e-12 * (1 + found[0].abs().max())
