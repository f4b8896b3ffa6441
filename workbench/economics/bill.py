"""Compute the bill of a workload, without a prompt cache and with each TTL that the price table sells.

Workloads are a repeated system prompt, recorded or generated traffic, and an agent's calls.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from workbench.economics.prices import Prices, Usage, total_usage
from workbench.economics.prompt_cache import CACHE_TTLS, CacheTTL, PromptCall, Seconds, cached_usage, uncached_usage
from workbench.errors import WorkbenchError
from workbench.simulate.arrival import Arrival
from workbench.simulate.generators import poisson_arrivals
from workbench.simulate.traffic_settings import Poisson

DAY = 86_400  # seconds
SYSTEM = "system prompt"


def even_times(requests: int, seconds: int | Fraction = DAY) -> list[Fraction]:
    """Return `requests` equally spaced times over `seconds`, the first at second 0, as exact fractions."""
    _require_positive(requests)
    gap = Fraction(seconds) / requests
    return [number * gap for number in range(requests)]


def random_times(requests: int, seconds: int | Fraction = DAY, seed: int = 0) -> list[float]:
    """Return `requests` times of a Poisson process with `requests` in `seconds` on average."""
    _require_positive(requests)
    drawn = poisson_arrivals(Poisson(rate=float(requests / Fraction(seconds))), random.Random(seed))
    return list(itertools.islice(drawn, requests))


def system_prompt_calls(
    times: Iterable[Seconds], prompt: int, question: int = 0, output: int = 0
) -> Iterator[PromptCall]:
    """Yield calls at `times`: each has the same `prompt` tokens, then its own `question` tokens, and `output`
    tokens."""
    return (PromptCall(time, ((SYSTEM, prompt),), question, output) for time in times)


def traffic_calls(arrivals: Iterable[Arrival], system: int = 0) -> Iterator[PromptCall]:
    """Yield one call for each arrival of a traffic, after a common system prompt of `system` tokens.

    Full blocks of a prompt are cacheable, since their names identify their content; all other prompt tokens are
    unique."""
    before: tuple[tuple[str, int], ...] = ((SYSTEM, system),) if system else ()
    for arrival in arrivals:
        full = arrival.prompt_tokens // arrival.block_tokens if arrival.blocks else 0
        blocks = (((arrival.tenant, name), arrival.block_tokens) for name in arrival.blocks[:full])
        rest = arrival.prompt_tokens - full * arrival.block_tokens
        yield PromptCall(arrival.time, (*before, *blocks), rest, arrival.output_tokens)


def agent_loop_calls(
    calls: int, start: int, new: int, output: int = 0, seconds: Seconds = 10, warm: bool = False
) -> Iterator[PromptCall]:
    """Yield the calls of an agent for one user message.

    Args:
        calls: Number of calls.
        start: Tokens before the first call.
        new: Tokens that each call adds to the conversation; every call sends the whole conversation again.
        output: Output tokens of the last call, part of `new`.
        seconds: Time between calls.
        warm: An earlier call with `start` tokens is yielded first.
    """
    _require_positive(calls)
    pieces: tuple[tuple[int, int], ...] = ((0, start),) if start else ()
    if warm:
        yield PromptCall(0, pieces)
    for number in range(calls):
        pieces = (*pieces, (number + 1, new))
        yield PromptCall((number + warm) * seconds, pieces, 0, output)


def _require_positive(count: int) -> None:
    if count < 1:
        raise WorkbenchError(f"{count} requests: give at least 1")


@dataclass(frozen=True)
class Bill:
    """Priced usage of many requests. `total` is exact: the sum over requests and the sum over kinds of tokens."""

    prices: Prices
    usages: tuple[Usage, ...]  # one per request, in order

    @classmethod
    def from_usages(cls, prices: Prices, usages: Iterable[Usage]) -> Bill:
        return cls(prices, tuple(usages))

    @cached_property
    def usage(self) -> Usage:
        return total_usage(self.usages)

    @cached_property
    def total(self) -> Fraction:
        return self.prices.cost(self.usage)

    @property
    def cost_by_kind(self) -> dict[str, Fraction]:
        """Return the cost by kind of tokens, for the kinds used."""
        return {kind: count * self.prices.token_price(kind) for kind, count in self.usage if count}

    @property
    def num_cache_writes(self) -> int:
        """Count the requests that wrote to the cache."""
        return sum(1 for usage in self.usages if usage.written)

    @property
    def num_cache_reads(self) -> int:
        """Count the requests that read from the cache."""
        return sum(1 for usage in self.usages if usage.cache_read)

    def saving_against(self, other: Bill) -> Fraction:
        """Return the saving against `other`; negative if this bill is larger."""
        return other.total - self.total

    def as_dict(self) -> dict[str, Any]:
        return {
            "total": float(self.total),
            "requests": len(self.usages),
            "requests_that_write": self.num_cache_writes,
            "requests_that_read": self.num_cache_reads,
            "tokens": dict(self.usage),
            "by_kind": {kind: float(cost) for kind, cost in self.cost_by_kind.items()},
        }


ARRIVALS: dict[str, Callable[[int, int | Fraction, int], Sequence[Any]]] = {
    "even": lambda requests, seconds, seed: even_times(requests, seconds),
    "poisson": random_times,
}


@dataclass(frozen=True)
class CachingPlan:
    """One caching plan and its bill; without a TTL, no cache."""

    ttl: CacheTTL | None
    renews: bool
    bill: Bill

    @property
    def name(self) -> str:
        if self.ttl is None:
            return "uncached"
        return f"{self.ttl.name}, {'renewed by hits' if self.renews else 'from the write on'}"


def price_plans(
    prices: Prices, calls: Sequence[PromptCall], ttls: Sequence[CacheTTL] = CACHE_TTLS
) -> list[CachingPlan]:
    """Price `calls` without a cache and under every TTL of the price table, with and without renewal by hits."""
    found = [CachingPlan(None, False, Bill.from_usages(prices, uncached_usage(calls)))]
    for life in ttls:
        if getattr(prices, life.kind) is not None:
            found += [
                CachingPlan(life, renews, Bill.from_usages(prices, cached_usage(calls, life, renews)))
                for renews in (True, False)
            ]
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
    """Return the maximum fraction of a prompt's price that caching can save: even if every request hits, reads cost
    money."""
    return 1 - prices.token_price("cache_read") / prices.token_price("input")
