"""Budgets: how many tokens are held, and that they are lost at places which the text alone decides."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from workbench.errors import WorkbenchError
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.eviction import HeavyHitters, SlidingWindowEviction, SnapKV, parse_eviction

budgets = st.builds(
    EvictionBudget, st.integers(1, 40), st.none(), st.one_of(st.none(), st.integers(1, 60)), st.booleans()
) | st.builds(EvictionBudget, st.none(), st.floats(0.01, 1.0), st.one_of(st.none(), st.integers(1, 60)), st.booleans())


def walk(budget: EvictionBudget, prompt: int, tokens: int, steps: list[int]) -> tuple[list[tuple[int, int]], int]:
    """Steps of so many tokens, over and over: the evictions as (computed, kept), and the most tokens held."""
    computed = evicted = most = number = 0
    found = []
    while computed < tokens:
        kept = budget.tokens_to_keep(prompt, computed, evicted)
        if kept is not None:
            found.append((computed, kept))
            evicted = computed - kept
        left = budget.tokens_until_eviction(prompt, computed, evicted)
        known = prompt if computed < prompt else computed + 1
        length = min(known - computed, steps[number % len(steps)], tokens - computed)
        computed += length if left is None else min(length, left)
        most, number = max(most, computed - evicted), number + 1
    return found, most


steps = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@given(budgets, st.integers(1, 80), st.integers(1, 40), steps, steps)
def test_the_text_decides_where_tokens_are_lost(budget, prompt, more, one, other) -> None:
    first, most = walk(budget, prompt, prompt + more, one)
    again, _ = walk(budget, prompt, prompt + more, other)
    assert first == again
    assert most <= budget.peak_tokens(prompt, prompt + more)
    assert all(1 <= kept <= budget.max_tokens(prompt) for _, kept in first)


@given(budgets, st.integers(1, 80), st.integers(1, 40), steps)
def test_as_much_is_held_as_the_budget_has_room_for(budget, prompt, more, lengths) -> None:
    found, most = walk(budget, prompt, prompt + more, lengths)
    tokens = prompt + more
    if not found:
        assert most == tokens
    elif budget.in_decode:
        assert most == budget.max_tokens(prompt) and budget.tokens_after_eviction(prompt) >= most // 2
    else:
        assert found == [(prompt, budget.max_tokens(prompt))]


@given(st.integers(1, 40), st.floats(1.0, 9.0), st.integers(1, 80), st.integers(1, 40))
def test_one_head_keeps_its_spread_and_always_loses_a_token(tokens: int, spread: float, prompt: int, more: int) -> None:
    budget = EvictionBudget(tokens, in_decode=False, spread=spread)
    found, most = walk(budget, prompt, prompt + more, [30])
    kept = budget.max_tokens(prompt)
    wanted = min(math.ceil(spread * kept), prompt - 1)
    assert found == ([(prompt, max(kept, wanted))] if prompt > kept else [])
    assert most <= budget.peak_tokens(prompt, prompt + more) and budget.tokens_after_eviction(prompt) == kept


def test_a_budget_is_given_in_tokens_bytes_or_a_ratio() -> None:
    page = 16, 3 * 1024
    assert HeavyHitters(budget=100).budget_for(*page).max_tokens(7) == 100
    assert HeavyHitters(bytes=10 * 1024).budget_for(*page).max_tokens(7) == 48  # three whole pages
    assert SnapKV(ratio=0.25).budget_for(*page).max_tokens(99) == 25
    assert HeavyHitters(budget=64).budget_for(*page).tokens_after_eviction(0) == 56
    assert SlidingWindowEviction(budget=64, block=63).budget_for(*page).tokens_after_eviction(0) == 32
    refuses("a page of 16 tokens takes 3,072 in all layers", lambda: HeavyHitters(bytes=3000).budget_for(*page))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "window"}, "evict.window: give exactly one of budget (tokens), bytes and ratio"),
        ({"kind": "window", "budget": 8, "ratio": 0.5}, "budget and ratio were given"),
        ({"kind": "heavy_hitters", "budget": 8, "num_sink_tokens": 4}, "evict.heavy_hitters.num_sink_tokens"),
        ({"budget": 8}, "evict: "),
        ({"kind": "snapkv", "budget": 1}, "evict.snapkv.budget"),
    ],
)
def test_mistakes_are_reported_by_their_path(wrong, message) -> None:
    with pytest.raises(WorkbenchError) as found:
        parse_eviction(wrong)
    assert message in str(found.value)
