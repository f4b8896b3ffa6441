"""A response cache: what it finds, and what it forgets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from workbench.economics.prices import Usage, load_prices
from workbench.economics.response_cache import replay_response_cache
from workbench.simulate.arrival import Arrival


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 5))
def test_it_is_a_bounded_lru(prompts: list[int], size: int) -> None:
    known: list[int] = []  # the latest last
    hits = 0
    for prompt in prompts:
        hits += prompt in known
        known = [*(each for each in known if each != prompt), prompt][-size:]
    arrivals = [Arrival(float(number), 600, 10, blocks=(prompt,)) for number, prompt in enumerate(prompts)]
    assert replay_response_cache(arrivals, load_prices("article-a"), size).hits == hits


def test_a_replayed_traffic() -> None:
    prices = load_prices("article-a")
    same = Arrival(0.0, 600, 10, blocks=(0, 1))
    other = [Arrival(1.0, 600, 10, blocks=(0, 2)), Arrival(2.0, 601, 10, blocks=(0, 1)), Arrival(3.0, 600, 10)]
    found = replay_response_cache([same, *other, Arrival(4.0, 600, 10), same], prices, 10)
    assert (found.requests, found.hits) == (6, 1) and found.hit_rate == 1 / 6
    assert found.saved == prices.cost(Usage(input=600, output=10)) and 0 < found.saved_fraction < 1 / 5
    assert replay_response_cache([same, *other, same], prices, 1).hits == 0
    tenants = [Arrival(0.0, 600, 10, tenant=name, blocks=(0, 1)) for name in "ab"]
    assert replay_response_cache(tenants, prices, 10).hits == 0
    assert replay_response_cache([], prices, 10).saved_fraction == 0
    refuses("at least 1", lambda: replay_response_cache([], prices, 0))
