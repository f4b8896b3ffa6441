"""Closed forms against the simulated cache: break-even, hits to expect, and which life is cheapest."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.economics.tables import PRICES, table
from workbench.economics.bill import (
    DAY,
    Bill,
    even_times,
    max_saving,
    random_times,
    system_prompt_calls,
    system_prompt_day,
)
from workbench.economics.prices import Prices, load_prices
from workbench.economics.prompt_cache import (
    CACHE_TTLS,
    FIVE_MINUTES,
    ONE_HOUR,
    CacheTTL,
    break_even,
    break_even_hit_rate,
    break_even_hits_per_write,
    cached_usage,
    cheapest_ttl,
    even_writes,
    poisson_writes,
    prefix_cost,
    uncached_usage,
)

A = load_prices("article-a")


def costs(prices: Prices, life: CacheTTL, requests: int) -> tuple[Fraction, Fraction]:
    """Cached and plain, of requests in one life."""
    calls = list(system_prompt_calls([Fraction(0)] * requests, 1000))
    return Bill.from_usages(prices, cached_usage(calls, life)).total, Bill.from_usages(
        prices, uncached_usage(calls)
    ).total


@given(PRICES, st.sampled_from(CACHE_TTLS))
def test_break_even_is_where_the_curves_cross(prices: Prices, life: CacheTTL) -> None:
    found = break_even(prices, life)
    if found.break_even_requests is not None:
        plain, write, read = (prices.token_price(kind) for kind in ("input", life.kind, "cache_read"))
        assert write + (found.break_even_requests - 1) * read == found.break_even_requests * plain
    if found.first_cheaper_request is None:
        assert all(mine >= plain for mine, plain in (costs(prices, life, n) for n in (1, 2, 10, 1000)))
    elif found.first_cheaper_request < 500:
        mine, plain = costs(prices, life, found.first_cheaper_request)
        assert mine < plain
        if found.first_cheaper_request > 1:
            mine, plain = costs(prices, life, found.first_cheaper_request - 1)
            assert mine >= plain


def test_the_second_request_is_the_first_read() -> None:
    five, hour = break_even(A, FIVE_MINUTES), break_even(A, ONE_HOUR)
    assert (five.break_even_requests, five.first_cheaper_request, five.first_cheaper_read) == (Fraction(115, 90), 2, 1)
    assert (hour.break_even_requests, hour.first_cheaper_request, hour.first_cheaper_read) == (Fraction(190, 90), 3, 2)
    assert break_even(table(read="3"), FIVE_MINUTES).first_cheaper_request is None
    assert break_even(table(write="2"), FIVE_MINUTES).first_cheaper_request == 1


@given(PRICES, st.sampled_from(CACHE_TTLS), st.integers(1, 10_000))
def test_at_the_share_that_pays_caching_costs_as_much_as_none(prices: Prices, life: CacheTTL, tokens: int) -> None:
    share = break_even_hit_rate(prices, life)
    plain, write, read = (prices.token_price(kind) for kind in ("input", life.kind, "cache_read"))
    if share is not None and 0 <= share < 1:
        assert share * read + (1 - share) * write == plain
        hits = break_even_hits_per_write(prices, life)
        assert hits is None or hits == share / (1 - share)


@given(
    st.integers(1, 60),
    st.fractions(1, 5000, max_denominator=6).filter(bool),
    st.sampled_from(CACHE_TTLS),
    st.booleans(),
)
def test_writes_of_even_arrivals(requests: int, gap: Fraction, life: CacheTTL, renews: bool) -> None:
    calls = list(system_prompt_calls(even_times(requests, gap * requests), 1))
    assert Bill.from_usages(A, cached_usage(calls, life, renews)).num_cache_writes == even_writes(
        requests, gap, life, renews
    )


@pytest.mark.parametrize("life", CACHE_TTLS, ids=lambda life: life.name)
@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("a_day", [6, 100, 1000, 4000])
def test_writes_of_poisson_arrivals(a_day: int, life: CacheTTL, renews: bool) -> None:
    requests, rate = 400, a_day / DAY
    counts = []
    for seed in range(24):
        times = random_times(requests, Fraction(requests * DAY, a_day), seed)
        counts.append(Bill.from_usages(A, cached_usage(system_prompt_calls(times, 1), life, renews)).num_cache_writes)
    error = statistics.stdev(counts) / math.sqrt(len(counts))
    # Of the second form a term is left out that is below one write.
    slack = 0.0 if renews else 0.5
    assert abs(statistics.mean(counts) - poisson_writes(requests, rate, life, renews)) <= 5 * error + slack + 1e-3


def test_the_long_run_is_the_share_of_hits() -> None:
    for renews in (True, False):
        for rate in (1e-4, 3e-3, 0.1):
            share = 1 - poisson_writes(10**7, rate, ONE_HOUR, renews) / 10**7
            x = rate * ONE_HOUR.seconds
            assert share == pytest.approx(-math.expm1(-x) if renews else x / (1 + x), abs=1e-6)


def exact_writes(requests: int, x: float) -> float:
    """Writes among the first requests where hits do not renew: the renewal equation, term by term."""
    cycle = [math.exp(-x + k * math.log(x) - math.lgamma(k + 1)) for k in range(requests)]  # of k reads
    u = [1.0]
    for n in range(1, requests):
        u.append(sum(cycle[k] * u[n - 1 - k] for k in range(n)))
    return sum(u)


@pytest.mark.parametrize("x", [0.05, 0.5, 3.5, 12.0, 42.0])
@pytest.mark.parametrize("requests", [1, 7, 50, 300])
def test_writes_from_the_write_on_are_within_half_a_write(requests: int, x: float) -> None:
    found = poisson_writes(requests, x / ONE_HOUR.seconds, ONE_HOUR, renews=False)
    assert abs(found - exact_writes(requests, x)) <= 0.5


@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("a_day", [6, 15, 20, 24, 40, 300, 1000, 6000])
def test_the_best_life_is_the_cheapest_simulated(a_day: int, renews: bool) -> None:
    days = 400 if a_day < 100 else 4
    sums: dict[CacheTTL | None, float] = dict.fromkeys((None, *CACHE_TTLS), 0.0)
    for seed in range(days):
        calls = list(system_prompt_calls(random_times(a_day, DAY, seed), 1))
        for life in sums:
            usages = uncached_usage(calls) if life is None else cached_usage(calls, life, renews)
            sums[life] += float(Bill.from_usages(A, usages).total)
    best = cheapest_ttl(A, a_day / DAY, a_day, renews)
    assert sums[best] <= min(sums.values()) * 1.01


def test_what_is_best_of_even_arrivals() -> None:
    def best(a_day: int, renews: bool = True) -> CacheTTL | None:
        return cheapest_ttl(A, a_day / DAY, a_day, renews, "even")

    assert best(12) is None and best(30) is ONE_HOUR and best(1000) is FIVE_MINUTES
    assert best(1000, renews=False) is ONE_HOUR
    assert cheapest_ttl(A, 1000 / DAY, 1000, arrivals="even", ttls=()) is None


def test_the_day_is_settled() -> None:
    plain, five, five_fixed, hour, hour_fixed = system_prompt_day(A)
    assert plain.bill.total == 6
    assert five.bill.total == Fraction(2000 * 3, 10**6) * (Fraction(125, 100) + 999 * Fraction(1, 10))
    assert (
        five.bill.num_cache_writes,
        five_fixed.bill.num_cache_writes,
        hour.bill.num_cache_writes,
        hour_fixed.bill.num_cache_writes,
    ) == (1, 250, 1, 24)
    assert five.bill.saving_against(plain.bill) == Fraction("5.3931") and five_fixed.bill.saving_against(
        plain.bill
    ) == Fraction("3.675")
    three = system_prompt_day(A, days=3)
    assert three[0].bill.total == 18 and [plan.bill.num_cache_writes for plan in three[1:]] == [1, 750, 1, 72]
    assert max_saving(A) == Fraction(9, 10)
    for plans in (
        system_prompt_day(A),
        system_prompt_day(A, arrivals="poisson"),
        system_prompt_day(A, requests=20_160),
    ):
        plain = plans[0].bill
        for plan in plans[1:]:
            assert plan.bill.saving_against(plain) < max_saving(A) * plain.total < Fraction("0.98") * plain.total


def test_a_prefix_costs_what_its_requests_do() -> None:
    plans = system_prompt_day(A, prompt=700, requests=90, arrivals="poisson")
    assert prefix_cost(A, None, 90, 0, 700) == pytest.approx(float(plans[0].bill.total))
    for plan in plans[1:]:
        assert prefix_cost(A, plan.ttl, 90, plan.bill.num_cache_writes, 700) == pytest.approx(float(plan.bill.total))
