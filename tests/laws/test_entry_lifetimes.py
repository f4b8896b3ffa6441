"""Requests a whole part of the TTL apart: the closed form counts the writes that the simulated cache makes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from workbench.economics.bill import Bill, even_times, system_prompt_calls
from workbench.economics.prices import load_prices
from workbench.economics.prompt_cache import CACHE_TTLS, CacheTTL, cached_usage, even_writes


@pytest.mark.parametrize("life", CACHE_TTLS, ids=lambda life: life.name)
@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("parts", [Fraction(1, 2), 1, 2, 3, Fraction(7, 2)])
def test_writes_of_requests_at_the_end_of_an_entry(life: CacheTTL, renews: bool, parts: Fraction) -> None:
    """An entry written at second 0 for 300 is not read at second 300."""
    gap, requests = life.seconds / Fraction(parts), 7
    calls = system_prompt_calls(even_times(requests, gap * requests), 1)
    bill = Bill.from_usages(load_prices("article-a"), cached_usage(calls, life, renews))
    assert bill.num_cache_writes == even_writes(requests, gap, life, renews)
