"""Figures that claims about prompt caches are checked with, as plain numbers for the rules of the ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from workbench.economics.bill import Bill
from workbench.economics.daily import ARRIVALS, day, most_saved, plans
from workbench.economics.life import (
    best_life,
    break_even,
    hit_share_to_pay,
    hits_a_write_to_pay,
    poisson_writes,
    prefix_cost,
)
from workbench.economics.prices import SOURCE, Prices, prices_of
from workbench.economics.prompt_cache import FIVE_MINUTES, LIVES, ONE_HOUR, Life, cached, uncached
from workbench.economics.workloads import DAY, even, system_prompt

Figures = dict[str, Any]


def cache_prices(prices: Prices | None = None) -> Figures:
    """Return the prices of writing and reading the cache, in input prices, and the maximum saving of caching."""
    prices = prices or prices_of(SOURCE)
    plain = prices.a_token("input")
    kinds = ("cache_write_5m", "cache_write_1h", "cache_read")
    return {kind: float(prices.a_token(kind) / plain) for kind in kinds} | {"most_saved": float(most_saved(prices))}


def cache_breakeven(prices: Prices | None = None) -> Figures:
    """Return the break-even points by TTL.

    Gives the crossing in requests within one TTL, and the first request and read at which caching is cheaper, by
    formula and by the simulated cache."""
    prices = prices or prices_of(SOURCE)
    return {life.name: _crossing(prices, life) for life in LIVES}


def _crossing(prices: Prices, life: Life) -> Figures:
    found = break_even(prices, life)
    calls = list(system_prompt(range(50), 1000))
    bills = ((n, Bill.of(prices, cached(calls[:n], life)), Bill.of(prices, uncached(calls[:n]))) for n in range(1, 51))
    simulated = next((n for n, mine, plain in bills if mine.total < plain.total), None)
    crossing = None if found.crossing is None else float(found.crossing)
    return {"crossing": crossing, "request": found.request, "read": found.read, "simulated_request": simulated}


def cache_daily(
    prices: Prices | None = None, prompt: int = 2000, requests: int = 1000, window: int = 70, seed: int = 0
) -> Figures:
    """Price a day of a system prompt without a cache and under each plan, with even and with random times.

    Also gives the saving if `window` requests fell into one TTL, and their real number."""
    prices = prices or prices_of(SOURCE)
    rows = []
    for arrivals in ARRIVALS:
        found = day(prices, prompt, requests, arrivals, seed)
        plain = found[0].bill
        for plan in found:
            saved = plan.bill.saves(plain)
            rows.append({
                "arrivals": arrivals, "plan": plan.name, "life": plan.life.name if plan.life else None,
                "renews": plan.renews, "cost": float(plan.bill.total), "saved": float(saved),
                "share": float(saved / plain.total), "writes": plan.bill.writes, "reads": plan.bill.reads,
            })  # fmt: skip
    busy = plans(prices, list(system_prompt(even(window, FIVE_MINUTES.seconds), prompt)), (FIVE_MINUTES,))
    return {
        "rows": rows,
        "uncached": rows[0]["cost"],
        "most_saved": float(most_saved(prices)),  # as a share, whatever the arrivals
        "requests_a_window": requests * FIVE_MINUTES.seconds / DAY,
        "share_at_window": float(busy[1].bill.saves(busy[0].bill) / busy[0].bill.total),
        "hit_share_at_window": (window - 1) / window,
    }


def cache_ttl_choice(
    prices: Prices | None = None, requests: int = 20_000, seed: int = 0, a_day: Iterable[int] = (6, 24, 100, 1000, 5000)
) -> Figures:
    """Return the hit rate at which each TTL pays, and the cheapest TTL by requests a day at random times.

    Costs of a request are in input prices under each plan, by formula and simulated."""
    prices = prices or prices_of(SOURCE)
    return {
        "hits_a_write_to_pay": {life.name: _number(hits_a_write_to_pay(prices, life)) for life in LIVES},
        "hit_share_to_pay": {life.name: _number(hit_share_to_pay(prices, life)) for life in LIVES},
        "pays_from_requests_an_hour": {life.name: _pays_from(prices, life) for life in LIVES},
        "rows": [row for count in a_day for row in _choices(prices, count, requests, seed)],
    }


def _pays_from(prices: Prices, life: Life) -> Figures:
    share, hits = _number(hit_share_to_pay(prices, life)), _number(hits_a_write_to_pay(prices, life))
    lives_an_hour = ONE_HOUR.seconds / life.seconds
    renewed = -math.log1p(-share) * lives_an_hour if share is not None and share < 1 else None
    return {"renewed": renewed, "from the write on": None if hits is None else hits * lives_an_hour}


def _choices(prices: Prices, a_day: int, requests: int, seed: int) -> Iterator[Figures]:
    rate, plain = a_day / DAY, float(prices.a_token("input"))
    times = ARRIVALS["poisson"](requests, Fraction(requests * DAY, a_day), seed)
    simulated = {(plan.life, plan.renews): plan.bill for plan in plans(prices, list(system_prompt(times, 1)))}
    for renews in (True, False):
        best = best_life(prices, rate, a_day, renews)
        costs: Figures = {}
        for life in LIVES:
            writes = poisson_writes(requests, rate, life, renews)
            formula = prefix_cost(prices, life, requests, writes, 1) / (requests * plain)
            costs[life.name] = {
                "formula": formula, "simulated": float(simulated[life, renews].total) / (requests * plain),
            }  # fmt: skip
        yield {"requests_a_day": a_day, "renews": renews, "best": best.name if best else None, "costs": costs}


def _number(value: Fraction | None) -> float | None:
    return None if value is None else float(value)
