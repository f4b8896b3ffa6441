"""A system prompt used for a day: the bill without a prompt cache, and with each TTL on sale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from workbench.economics.bill import Bill
from workbench.economics.prices import Prices
from workbench.economics.prompt_cache import CACHE_TTLS, PromptCall, CacheTTL, cached_usage, uncached_usage
from workbench.economics.workloads import DAY, even_times, random_times, system_prompt_calls

ARRIVALS: dict[str, Callable[[int, int | Fraction, int], Sequence[Any]]] = {
    "even": lambda requests, seconds, seed: even_times(requests, seconds),
    "poisson": random_times,
}


@dataclass(frozen=True)
class CachingPlan:
    """One way of caching and its bill; without a TTL, no cache."""

    ttl: CacheTTL | None
    renews: bool
    bill: Bill

    @property
    def name(self) -> str:
        if self.ttl is None:
            return "uncached"
        return f"{self.ttl.name}, {'renewed by hits' if self.renews else 'from the write on'}"


def price_plans(prices: Prices, calls: Sequence[PromptCall], ttls: Sequence[CacheTTL] = CACHE_TTLS) -> list[CachingPlan]:
    """Price `calls` without a cache and under every TTL of the price table, renewed by hits and not."""
    found = [CachingPlan(None, False, Bill.from_usages(prices, uncached_usage(calls)))]
    for life in ttls:
        if getattr(prices, life.kind) is not None:
            found += [CachingPlan(life, renews, Bill.from_usages(prices, cached_usage(calls, life, renews))) for renews in (True, False)]
    return found


def system_prompt_day(
    prices: Prices, prompt: int = 2000, requests: int = 1000, arrivals: str = "even", seed: int = 0, days: int = 1,
    question: int = 0, output: int = 0,
) -> list[CachingPlan]:  # fmt: skip
    """Price `requests` a day with a system prompt of `prompt` tokens under every plan.

    Args:
        prices: The price table.
        prompt: Tokens of the system prompt.
        requests: Requests a day.
        arrivals: `even`, or `poisson` for random times.
        seed: Seed of random times.
        days: Number of days.
        question: Tokens of each request's own question.
        output: Output tokens of each request.
    """
    times = ARRIVALS[arrivals](requests * days, DAY * days, seed)
    return price_plans(prices, list(system_prompt_calls(times, prompt, question, output)))


def max_saving(prices: Prices) -> Fraction:
    """Return the fraction of a prompt's price that caching can save at most: even if every request hits, the prompt is
    read."""
    return 1 - prices.token_price("cache_read") / prices.token_price("input")
