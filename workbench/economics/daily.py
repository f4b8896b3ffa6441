"""A system prompt used for a day: the bill without a prompt cache, and with each TTL on sale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from workbench.economics.bill import Bill
from workbench.economics.prices import Prices
from workbench.economics.prompt_cache import LIVES, Call, Life, cached, uncached
from workbench.economics.workloads import DAY, even, random_times, system_prompt

ARRIVALS: dict[str, Callable[[int, int | Fraction, int], Sequence[Any]]] = {
    "even": lambda requests, seconds, seed: even(requests, seconds),
    "poisson": random_times,
}


@dataclass(frozen=True)
class Plan:
    """One way of caching and its bill; without a TTL, no cache."""

    life: Life | None
    renews: bool
    bill: Bill

    @property
    def name(self) -> str:
        if self.life is None:
            return "uncached"
        return f"{self.life.name}, {'renewed by hits' if self.renews else 'from the write on'}"


def plans(prices: Prices, calls: Sequence[Call], lives: Sequence[Life] = LIVES) -> list[Plan]:
    """Price `calls` without a cache and under every TTL of the price table, renewed by hits and not."""
    found = [Plan(None, False, Bill.of(prices, uncached(calls)))]
    for life in lives:
        if getattr(prices, life.kind) is not None:
            found += [Plan(life, renews, Bill.of(prices, cached(calls, life, renews))) for renews in (True, False)]
    return found


def day(
    prices: Prices, prompt: int = 2000, requests: int = 1000, arrivals: str = "even", seed: int = 0, days: int = 1,
    question: int = 0, output: int = 0,
) -> list[Plan]:  # fmt: skip
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
    return plans(prices, list(system_prompt(times, prompt, question, output)))


def most_saved(prices: Prices) -> Fraction:
    """Return the fraction of a prompt's price that caching can save at most: even if every request hits, the prompt is
    read."""
    return 1 - prices.a_token("cache_read") / prices.a_token("input")
