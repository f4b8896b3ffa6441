"""Policies of eviction: laws of the choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import tries
from workbench.kv_cache.eviction import HeavyHitters, SinksRecent, SlidingWindowEviction, SnapKV

policies = st.one_of(
    st.builds(HeavyHitters, budget=st.just(2), recent=st.floats(0.01, 1.0)),
    st.builds(SlidingWindowEviction, budget=st.just(2)),
    st.builds(SinksRecent, budget=st.just(2), num_sink_tokens=st.integers(1, 9)),
    st.builds(SnapKV, budget=st.just(2), observe=st.integers(1, 9), pool=st.integers(1, 9)),
)
masses = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=60).map(torch.tensor)


@given(policies, masses, st.integers(2, 40))
def test_as_many_as_the_budget_in_order_and_the_newest(policy, mass, budget) -> None:
    kept = policy.select(mass, budget).tolist()
    assert len(kept) == min(budget, len(mass)) and kept == sorted(set(kept))
    assert kept[-1] == len(mass) - 1 and kept[0] >= 0


@given(masses, st.integers(2, 40), st.floats(0.01, 1.0))
def test_nothing_that_went_was_heavier_than_an_old_one_that_stayed(mass, budget, recent) -> None:
    policy = HeavyHitters(budget=budget, recent=recent)
    kept = policy.select(mass, budget).tolist()
    newest = len(mass) - max(1, round(recent * budget))
    gone = [float(mass[slot]) for slot in range(len(mass)) if slot not in kept]
    stayed = [float(mass[slot]) for slot in kept if slot < newest]
    assert not gone or not stayed or max(gone) <= min(stayed)


@given(policies, masses, st.integers(2, 40))
def test_keeping_again_keeps_all(policy, mass, budget) -> None:
    kept = policy.select(mass, budget)
    assert policy.select(mass[kept], budget).tolist() == list(range(len(kept)))


@settings(max_examples=tries(300))
@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.integers(2, 20), st.integers(1, 9), st.integers(1, 9))
def test_snapkv_keeps_its_queries_tokens_and_the_heaviest_with_their_neighbours(mass, budget, observe, pool) -> None:
    """Of equal ones the older."""
    reach, newest = pool // 2, min(observe, budget)
    shared = [sum(mass[max(0, slot - reach) : slot + reach + 1]) for slot in range(len(mass))]
    older = sorted(range(max(0, len(mass) - newest)), key=lambda slot: (-shared[slot], slot))[: budget - newest]
    policy = SnapKV(budget=2, observe=observe, pool=pool)
    wanted = [*sorted(older), *range(max(0, len(mass) - newest), len(mass))]
    assert policy.select(torch.tensor(mass, dtype=torch.float64), budget).tolist() == wanted


def test_place_alone_decides_for_windows_and_sinks() -> None:
    mass = torch.rand(20)
    assert SlidingWindowEviction(budget=4).select(mass, 4).tolist() == [16, 17, 18, 19]
    assert SinksRecent(budget=4, num_sink_tokens=2).select(mass, 5).tolist() == [0, 1, 17, 18, 19]


@pytest.mark.parametrize("wrong", [{"budget": 1}, {"budget": 8, "recent": 0}, {"budget": 8, "num_sink_tokens": 4}])
def test_mistakes_are_refused(wrong) -> None:
    with pytest.raises(ValueError):
        HeavyHitters(**wrong)
