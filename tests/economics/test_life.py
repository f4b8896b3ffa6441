"""Closed forms against the simulated cache: break-even, hits to expect, and which life is cheapest."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.economics.tables import PRICES, table
from workbench.economics.bill import Bill
from workbench.economics.daily import day, most_saved
from workbench.economics.life import (
    best_life,
    break_even,
    even_writes,
    hit_share_to_pay,
    hits_a_write_to_pay,
    poisson_hit_share,
    poisson_writes,
    prefix_cost,
)
from workbench.economics.prices import Prices, prices_of
from workbench.economics.prompt_cache import FIVE_MINUTES, LIVES, ONE_HOUR, Life, cached, uncached
from workbench.economics.workloads import DAY, even, random_times, system_prompt

A = prices_of("article-a")


def costs(prices: Prices, life: Life, requests: int) -> tuple[Fraction, Fraction]:
    """Cached and plain, of requests in one life."""
    calls = list(system_prompt([Fraction(0)] * requests, 1000))
    return Bill.of(prices, cached(calls, life)).total, Bill.of(prices, uncached(calls)).total


@given(PRICES, st.sampled_from(LIVES))
def test_break_even_is_where_the_curves_cross(prices: Prices, life: Life) -> None:
    found = break_even(prices, life)
    if found.crossing is not None:
        plain, write, read = (prices.a_token(kind) for kind in ("input", life.kind, "cache_read"))
        assert write + (found.crossing - 1) * read == found.crossing * plain
    if found.request is None:
        assert all(mine >= plain for mine, plain in (costs(prices, life, n) for n in (1, 2, 10, 1000)))
    elif found.request < 500:
        mine, plain = costs(prices, life, found.request)
        assert mine < plain
        if found.request > 1:
            mine, plain = costs(prices, life, found.request - 1)
            assert mine >= plain


def test_the_second_request_is_the_first_read() -> None:
    five, hour = break_even(A, FIVE_MINUTES), break_even(A, ONE_HOUR)
    assert (five.crossing, five.request, five.read) == (Fraction(115, 90), 2, 1)
    assert (hour.crossing, hour.request, hour.read) == (Fraction(190, 90), 3, 2)
    assert break_even(table(read="3"), FIVE_MINUTES).request is None
    assert break_even(table(write="2"), FIVE_MINUTES).request == 1


@given(PRICES, st.sampled_from(LIVES), st.integers(1, 10_000))
def test_at_the_share_that_pays_caching_costs_as_much_as_none(prices: Prices, life: Life, tokens: int) -> None:
    share = hit_share_to_pay(prices, life)
    plain, write, read = (prices.a_token(kind) for kind in ("input", life.kind, "cache_read"))
    if share is not None and 0 <= share < 1:
        assert share * read + (1 - share) * write == plain
        hits = hits_a_write_to_pay(prices, life)
        assert hits is None or hits == share / (1 - share)


@given(
    st.integers(1, 60), st.fractions(1, 5000, max_denominator=6).filter(bool), st.sampled_from(LIVES), st.booleans()
)
def test_writes_of_even_arrivals(requests: int, gap: Fraction, life: Life, renews: bool) -> None:
    calls = list(system_prompt(even(requests, gap * requests), 1))
    assert Bill.of(A, cached(calls, life, renews)).writes == even_writes(requests, gap, life, renews)


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("a_day", [6, 100, 1000, 4000])
def test_writes_of_poisson_arrivals(a_day: int, life: Life, renews: bool) -> None:
    requests, rate = 400, a_day / DAY
    counts = []
    for seed in range(24):
        times = random_times(requests, Fraction(requests * DAY, a_day), seed)
        counts.append(Bill.of(A, cached(system_prompt(times, 1), life, renews)).writes)
    error = statistics.stdev(counts) / math.sqrt(len(counts))
    # Of the second form a term is left out that is below one write.
    slack = 0.0 if renews else 0.5
    assert abs(statistics.mean(counts) - poisson_writes(requests, rate, life, renews)) <= 5 * error + slack + 1e-3


def test_the_long_run_is_the_share_of_hits() -> None:
    for renews in (True, False):
        for rate in (1e-4, 3e-3, 0.1):
            share = 1 - poisson_writes(10**7, rate, ONE_HOUR, renews) / 10**7
            assert share == pytest.approx(poisson_hit_share(rate, ONE_HOUR, renews), abs=1e-6)


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
    sums: dict[Life | None, float] = dict.fromkeys((None, *LIVES), 0.0)
    for seed in range(days):
        calls = list(system_prompt(random_times(a_day, DAY, seed), 1))
        for life in sums:
            usages = uncached(calls) if life is None else cached(calls, life, renews)
            sums[life] += float(Bill.of(A, usages).total)
    best = best_life(A, a_day / DAY, a_day, renews)
    assert sums[best] <= min(sums.values()) * 1.01


def test_what_is_best_of_even_arrivals() -> None:
    def best(a_day: int, renews: bool = True) -> Life | None:
        return best_life(A, a_day / DAY, a_day, renews, "even")

    assert best(12) is None and best(30) is ONE_HOUR and best(1000) is FIVE_MINUTES
    assert best(1000, renews=False) is ONE_HOUR
    assert best_life(A, 1000 / DAY, 1000, arrivals="even", lives=()) is None


def test_the_day_is_settled() -> None:
    plain, five, five_fixed, hour, hour_fixed = day(A)
    assert plain.bill.total == 6
    assert five.bill.total == Fraction(2000 * 3, 10**6) * (Fraction(125, 100) + 999 * Fraction(1, 10))
    assert (five.bill.writes, five_fixed.bill.writes, hour.bill.writes, hour_fixed.bill.writes) == (1, 250, 1, 24)
    assert five.bill.saves(plain.bill) == Fraction("5.3931") and five_fixed.bill.saves(plain.bill) == Fraction("3.675")
    assert most_saved(A) == Fraction(9, 10)
    for plans in (day(A), day(A, arrivals="poisson"), day(A, requests=20_160)):
        plain = plans[0].bill
        for plan in plans[1:]:
            assert plan.bill.saves(plain) < most_saved(A) * plain.total < Fraction("0.98") * plain.total


def test_a_prefix_costs_what_its_requests_do() -> None:
    plans = day(A, prompt=700, requests=90, arrivals="poisson")
    assert prefix_cost(A, None, 90, 0, 700) == pytest.approx(float(plans[0].bill.total))
    for plan in plans[1:]:
        assert prefix_cost(A, plan.life, 90, plan.bill.writes, 700) == pytest.approx(float(plan.bill.total))
