"""The priced workload as one plain answer: the cost of each plan, its break-even, and the source's own figures."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from workbench.economics.bill import (
    DAY,
    CachingPlan,
    even_times,
    max_saving,
    price_plans,
    system_prompt_calls,
    system_prompt_day,
    traffic_calls,
)
from workbench.economics.prices import KINDS, Prices, Usage
from workbench.economics.prompt_cache import (
    CACHE_TTLS,
    FIVE_MINUTES,
    break_even,
    cheapest_ttl,
    even_writes,
    poisson_writes,
    prefix_cost,
)
from workbench.economics.response_cache import replay_response_cache
from workbench.simulate.arrival import Arrival

RESPONSE_CACHE_SIZE = 100_000  # answers that the exact-match cache holds


def price_day(
    prices: Prices, prompt: int, requests: int, arrivals: str, seed: int = 0, days: int = 1, question: int = 0,
    output: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Price a system prompt used `requests` times a day, at even or random times."""
    found = system_prompt_day(prices, prompt, requests, arrivals, seed, days, question, output)
    asked = {
        "prompt": prompt, "question": question, "output": output, "requests_a_day": requests, "days": days,
        "arrivals": arrivals, "seed": seed,
    }  # fmt: skip
    besides = requests * days * float(prices.cost(Usage(input=question, output=output)))
    rows = [row | {"by_formula": _formula(prices, plan, asked) + besides} for row, plan in _rows(found)]
    answer = {"workload": asked, **_about(prices), "plans": rows}
    if prices.cache_read is not None:
        rate = Fraction(requests, DAY)
        answer["requests_per_ttl"] = {life.name: float(rate * life.seconds) for life in CACHE_TTLS}
        answer["cheapest"] = _cheapest(prices, rate, requests * days, arrivals)
        if (days, question, output) == (1, 0, 0):
            answer["said"] = _said(prices, prompt, requests)
    return answer


def price_traffic(prices: Prices, arrivals: Sequence[Arrival], system: int = 0) -> dict[str, Any]:
    """Price a traffic with its named blocks cached, and a system prompt before them all."""
    found = price_plans(prices, list(traffic_calls(arrivals, system)))
    blocks = any(arrival.blocks for arrival in arrivals)
    asked = {"prompt": system, "requests": len(arrivals), "arrivals": "trace", "blocks": blocks}
    answer = {"workload": asked, **_about(prices), "plans": [row for row, _ in _rows(found)]}
    if blocks:
        kept = replay_response_cache(arrivals, prices, RESPONSE_CACHE_SIZE)
        answer["response_cache"] = {
            "hits": kept.hits, "hit_rate": kept.hit_rate, "saved": float(kept.saved), "share": kept.saved_fraction,
        }  # fmt: skip
    return answer


def _about(prices: Prices) -> dict[str, Any]:
    about: dict[str, Any] = {"prices": prices.model_dump(mode="json", exclude={"says"})}
    for kind in KINDS:
        amount = getattr(prices, kind)
        about["prices"][kind] = None if amount is None else float(amount)
    if prices.cache_read is not None:
        about["most_saved"] = float(max_saving(prices)) if prices.input else None
        bought = [life for life in CACHE_TTLS if getattr(prices, life.kind) is not None]
        break_even_points = {life.name: break_even(prices, life) for life in bought}
        about["break_even"] = {
            name: {
                "crossing": None if found.break_even_requests is None else float(found.break_even_requests),
                "request": found.first_cheaper_request, "read": found.first_cheaper_read,
            }
            for name, found in break_even_points.items()
        }  # fmt: skip
    return about


def _rows(found: Sequence[CachingPlan]) -> list[tuple[dict[str, Any], CachingPlan]]:
    plain = found[0].bill
    rows = []
    for plan in found:
        saved = plan.bill.saving_against(plain)
        share = float(saved / plain.total) if plain.total else None
        rows.append(({"plan": plan.name, **plan.bill.as_dict(), "saved": float(saved), "share": share}, plan))
    return rows


def _formula(prices: Prices, plan: CachingPlan, asked: dict[str, Any]) -> float:
    requests, life = asked["requests_a_day"] * asked["days"], plan.ttl
    rate, writes = Fraction(asked["requests_a_day"], DAY), 0.0
    if life is not None and asked["arrivals"] == "even":
        writes = even_writes(requests, 1 / rate, life, plan.renews)
    elif life is not None:
        writes = poisson_writes(requests, float(rate), life, plan.renews)
    return prefix_cost(prices, life, requests, writes, asked["prompt"])


def _cheapest(prices: Prices, rate: Fraction, requests: int, arrivals: str) -> dict[str, str | None]:
    found = {}
    for renews, name in ((True, "renewed by hits"), (False, "from the write on")):
        best = cheapest_ttl(prices, rate, requests, renews, arrivals)
        found[name] = None if best is None else best.name
    return found


def _said(prices: Prices, prompt: int, requests: int) -> list[dict[str, Any]]:
    """Compare the source's figures for this very day with the figures at its own number of requests a TTL."""
    rows = []
    for said in prices.says:
        if (said.prompt, said.requests) != (prompt, requests):
            continue
        calls = list(system_prompt_calls(even_times(said.requests_per_ttl, FIVE_MINUTES.seconds), prompt))
        plain, busy = price_plans(prices, calls, (FIVE_MINUTES,))[:2]
        rows.append({
            "uncached": float(said.uncached), "saved": float(said.saved), "share": float(said.share),
            "requests_per_ttl": said.requests_per_ttl,
            "requests_a_day_at_that": said.requests_per_ttl * DAY // FIVE_MINUTES.seconds,
            "share_at_that": float(busy.bill.saving_against(plain.bill) / plain.bill.total),
            "hit_share_at_that": (said.requests_per_ttl - 1) / said.requests_per_ttl,
        })  # fmt: skip
    return rows
