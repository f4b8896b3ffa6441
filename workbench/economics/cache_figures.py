"""Compute figures about prompt caches, as plain numbers that the rules of the claims ledger check."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from workbench.economics.bill import (
    ARRIVALS,
    DAY,
    Bill,
    even_times,
    max_saving,
    price_plans,
    system_prompt_calls,
    system_prompt_day,
)
from workbench.economics.prices import DEFAULT_TABLE, Prices, load_prices
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
    poisson_writes,
    prefix_cost,
    uncached_usage,
)

CacheFigures = dict[str, Any]
PROMPT_TOKENS, REQUESTS_A_DAY, WINDOW = 2000, 1000, 70


def cache_breakeven(prices: Prices | None = None) -> CacheFigures:
    """Return the break-even points of caching, by TTL.

    They are the break-even number of requests within one TTL, and the number of the first request and of the first read
    at which caching is cheaper, by formula and by the simulated cache."""
    prices = prices or load_prices(DEFAULT_TABLE)
    return {life.name: _crossing(prices, life) for life in CACHE_TTLS}


def _crossing(prices: Prices, ttl: CacheTTL) -> CacheFigures:
    found = break_even(prices, ttl)
    calls = list(system_prompt_calls(range(50), 1000))
    bills = (
        (n, Bill.from_usages(prices, cached_usage(calls[:n], ttl)), Bill.from_usages(prices, uncached_usage(calls[:n])))
        for n in range(1, 51)
    )
    simulated = next((n for n, mine, plain in bills if mine.total < plain.total), None)
    crossing = None if found.break_even_requests is None else float(found.break_even_requests)
    return {
        "crossing": crossing,
        "request": found.first_cheaper_request,
        "read": found.first_cheaper_read,
        "simulated_request": simulated,
    }


def cache_daily(prices: Prices | None = None) -> CacheFigures:
    """Return the cost of a day's requests with one system prompt, without a cache and under each caching plan, at even
    and at random times.

    Also return the saving if `WINDOW` requests fell into one TTL, and the average number of requests in a TTL."""
    prices = prices or load_prices(DEFAULT_TABLE)
    rows = []
    for arrivals in ARRIVALS:
        found = system_prompt_day(prices, PROMPT_TOKENS, REQUESTS_A_DAY, arrivals)
        plain = found[0].bill
        for plan in found:
            saved = plan.bill.saving_against(plain)
            rows.append({
                "arrivals": arrivals, "plan": plan.name, "ttl": plan.ttl.name if plan.ttl else None,
                "renews": plan.renews, "cost": float(plan.bill.total), "saved": float(saved),
                "share": float(saved / plain.total),
                "writes": plan.bill.num_cache_writes, "reads": plan.bill.num_cache_reads,
            })  # fmt: skip
    busy = price_plans(
        prices, list(system_prompt_calls(even_times(WINDOW, FIVE_MINUTES.seconds), PROMPT_TOKENS)), (FIVE_MINUTES,)
    )
    return {
        "rows": rows,
        "uncached": rows[0]["cost"],
        "most_saved": float(max_saving(prices)),  # maximum fraction saved, for any arrivals
        "requests_a_window": REQUESTS_A_DAY * FIVE_MINUTES.seconds / DAY,
        "share_at_window": float(busy[1].bill.saving_against(busy[0].bill) / busy[0].bill.total),
        "hit_share_at_window": (WINDOW - 1) / WINDOW,
    }


def cache_ttl_choice(
    prices: Prices | None = None, requests: int = 20_000, seed: int = 0, a_day: Iterable[int] = (6, 24, 100, 1000, 5000)
) -> CacheFigures:
    """Return the break-even hit rate of each TTL, and the cheapest TTL for each number of requests per day at random
    times.

    The costs per request of each plan, by formula and simulated, are in units of the price of an input token."""
    prices = prices or load_prices(DEFAULT_TABLE)
    return {
        "hits_a_write_to_pay": {life.name: _number(break_even_hits_per_write(prices, life)) for life in CACHE_TTLS},
        "hit_share_to_pay": {life.name: _number(break_even_hit_rate(prices, life)) for life in CACHE_TTLS},
        "pays_from_requests_an_hour": {life.name: _pays_from(prices, life) for life in CACHE_TTLS},
        "rows": [row for count in a_day for row in _choices(prices, count, requests, seed)],
    }


def _pays_from(prices: Prices, ttl: CacheTTL) -> CacheFigures:
    share, hits = _number(break_even_hit_rate(prices, ttl)), _number(break_even_hits_per_write(prices, ttl))
    lives_an_hour = ONE_HOUR.seconds / ttl.seconds
    renewed = -math.log1p(-share) * lives_an_hour if share is not None and share < 1 else None
    return {"renewed": renewed, "from the write on": None if hits is None else hits * lives_an_hour}


def _choices(prices: Prices, a_day: int, requests: int, seed: int) -> Iterator[CacheFigures]:
    rate, plain = a_day / DAY, float(prices.token_price("input"))
    times = ARRIVALS["poisson"](requests, Fraction(requests * DAY, a_day), seed)
    simulated = {
        (plan.ttl, plan.renews): plan.bill for plan in price_plans(prices, list(system_prompt_calls(times, 1)))
    }
    for renews in (True, False):
        best = cheapest_ttl(prices, rate, a_day, renews)
        costs: CacheFigures = {}
        for life in CACHE_TTLS:
            writes = poisson_writes(requests, rate, life, renews)
            formula = prefix_cost(prices, life, requests, writes, 1) / (requests * plain)
            costs[life.name] = {
                "formula": formula, "simulated": float(simulated[life, renews].total) / (requests * plain),
            }  # fmt: skip
        yield {"requests_a_day": a_day, "renews": renews, "best": best.name if best else None, "costs": costs}


def _number(value: Fraction | None) -> float | None:
    return None if value is None else float(value)
