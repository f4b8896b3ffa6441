"""Model a vendor's prompt cache: reads and writes of requests by their times, and break-even in closed form.

An entry is a whole prefix of a prompt. It lives for the paid TTL, counted from its write or, if hits renew it, from its
last read. An entry written at second 0 for 300 seconds can be read before second 300 but not at it.

In the closed forms `x` is the number of requests within one TTL: the rate times the TTL. With Poisson arrivals a
request hits with probability 1 - exp(-x) if hits renew the entry (the gap before it is shorter than the TTL).
Otherwise the long-run hit rate is x / (1 + x), since x reads follow each write on average.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from workbench.economics.prices import Prices, Usage
from workbench.errors import WorkbenchError

Seconds = float | Fraction


@dataclass(frozen=True, slots=True)
class CacheTTL:
    """A TTL of cache entries, and the kind of price that writes with it have."""

    name: str
    seconds: int
    kind: str


FIVE_MINUTES = CacheTTL("5 minutes", 300, "cache_write_5m")
ONE_HOUR = CacheTTL("1 hour", 3600, "cache_write_1h")
CACHE_TTLS = (FIVE_MINUTES, ONE_HOUR)


@dataclass(frozen=True, slots=True)
class PromptCall:
    """One request: cacheable `segments` of its prompt in order, as (name, tokens); then `input` uncached tokens, and
    `output` tokens.

    `marked` are the numbers of segments, from 1, that end an entry; default: all. Entries of other requests are found
    at the end of any segment.
    """

    time: Seconds
    segments: tuple[tuple[Hashable, int], ...] = ()
    input: int = 0
    output: int = 0
    marked: frozenset[int] | None = None

    @property
    def cacheable(self) -> int:
        return sum(tokens for _, tokens in self.segments)


class PromptCache:
    """A prompt cache that serves calls in order of time.

    A call reads the longest entry that is a prefix of its prompt, and writes the segments after it; each marked
    segment ends an entry."""

    def __init__(self, ttl: CacheTTL, renews: bool = True):
        self.ttl, self.renews = ttl, renews
        self._names: dict[tuple[int, Hashable], int] = {}  # (id of a prefix, next segment) -> id of the longer prefix
        self._ends: dict[int, Seconds] = {}  # id of a prefix -> time at which its entry expires
        self._now: Seconds | None = None

    def serve(self, call: PromptCall) -> Usage:
        if self._now is not None and call.time < self._now:
            raise WorkbenchError(f"a request at second {call.time} after one at {self._now}: give them in order")
        self._now = call.time
        path = self._path(call)
        found = max((at for at, name in enumerate(path, 1) if self._ends.get(name, call.time) > call.time), default=0)
        for at, name in enumerate(path, 1):
            is_marked = call.marked is None or at in call.marked
            is_renewed = self.renews and (is_marked or self._ends.get(name, call.time) > call.time)
            if is_renewed if at <= found else is_marked:
                self._ends[name] = call.time + self.ttl.seconds
        read = sum(tokens for _, tokens in call.segments[:found])
        return Usage(input=call.input, cache_read=read, output=call.output, **{self.ttl.kind: call.cacheable - read})

    def _path(self, call: PromptCall) -> list[int]:
        """Return the ids of the call's prefixes, one per segment end."""
        path, before = [], 0
        for piece, _ in call.segments:
            before = self._names.setdefault((before, piece), len(self._names) + 1)
            path.append(before)
        return path


def cached_usage(calls: Iterable[PromptCall], ttl: CacheTTL, renews: bool = True) -> Iterator[Usage]:
    """Yield the token usage of each call with a prompt cache."""
    cache = PromptCache(ttl, renews)
    return map(cache.serve, calls)


def uncached_usage(calls: Iterable[PromptCall]) -> Iterator[Usage]:
    """Yield the token usage of each call without a prompt cache."""
    return (Usage(input=call.cacheable + call.input, output=call.output) for call in calls)


@dataclass(frozen=True)
class BreakEven:
    """Break-even of caching within one TTL.

    `break_even_requests` solves w + (n - 1) r = n p for n: one write and reads of the rest against the plain price.
    `first_cheaper_request` is the first request at which caching is cheaper, `first_cheaper_read` the first such read.
    None if caching is never cheaper."""

    break_even_requests: Fraction | None
    first_cheaper_request: int | None

    @property
    def first_cheaper_read(self) -> int | None:
        return None if self.first_cheaper_request is None else self.first_cheaper_request - 1


def break_even(prices: Prices, ttl: CacheTTL) -> BreakEven:
    plain, write, read = _plain_write_read(prices, ttl)
    if write < plain:
        return BreakEven(None, 1)  # cheaper from the first request on, at any price of reads
    if read >= plain:
        return BreakEven(None, None)
    crossing = (write - read) / (plain - read)
    return BreakEven(crossing, math.floor(crossing) + 1)


def break_even_hit_rate(prices: Prices, ttl: CacheTTL) -> Fraction | None:
    """Return the hit rate at which caching costs as much as no cache.

    Below 0, caching always costs less; above 1, never. None if a read costs as much as a write, so that hits save
    nothing."""
    plain, write, read = _plain_write_read(prices, ttl)
    return (write - plain) / (write - read) if write > read else None


def break_even_hits_per_write(prices: Prices, ttl: CacheTTL) -> Fraction | None:
    """Return the mean number of reads after each write at which caching costs as much as no cache.

    Returns None if a read costs as much as an uncached token."""
    plain, write, read = _plain_write_read(prices, ttl)
    return (write - plain) / (plain - read) if plain > read else None


def even_writes(requests: int, gap: Fraction, ttl: CacheTTL, renews: bool = True) -> int:
    """Return the number of cache writes among `requests` requests that are `gap` seconds apart."""
    if gap >= ttl.seconds:
        return requests
    return 1 if renews else math.ceil(Fraction(requests, math.ceil(ttl.seconds / gap)))


def poisson_writes(requests: int, rate: float, ttl: CacheTTL, renews: bool = True) -> float:
    """Return the expected number of cache writes among the first `requests` requests of a Poisson process.

    Exact if hits renew the entry; otherwise the first two terms of the renewal theorem, with cycles of 1 + Poisson(x)
    requests."""
    x = rate * ttl.seconds
    if renews:
        return 1 + (requests - 1) * math.exp(-x)
    return min(requests, max(1.0, requests / (1 + x) + x * (2 + x) / (2 * (1 + x) ** 2)))


def prefix_cost(prices: Prices, ttl: CacheTTL | None, requests: int, writes: float | int, tokens: int) -> float:
    """Return the cost of a common prefix of `tokens` tokens over `requests` requests, `writes` of which write it to the
    cache; without a TTL, the cost without a cache."""
    if ttl is None:
        return float(requests * tokens * prices.token_price("input"))
    _, write, read = _plain_write_read(prices, ttl)
    return tokens * (writes * float(write) + (requests - writes) * float(read))


def cheapest_ttl(
    prices: Prices, rate: float | Fraction, requests: int, renews: bool = True, arrivals: str = "poisson",
    ttls: Iterable[CacheTTL] = CACHE_TTLS,
) -> CacheTTL | None:  # fmt: skip
    """Return the TTL at which `requests` requests cost least; None if no cache is cheapest.

    Args:
        prices: The price table.
        rate: Requests a second.
        requests: Number of requests.
        renews: Hits renew the entry.
        arrivals: `even` or `poisson`.
        ttls: TTLs to choose from; those without a price are skipped.
    """
    costs: dict[CacheTTL | None, float] = {None: prefix_cost(prices, None, requests, 0, 1)}
    for life in ttls:
        if getattr(prices, life.kind) is None:
            continue
        if arrivals == "even":
            writes = even_writes(requests, 1 / Fraction(rate), life, renews)
        else:
            writes = poisson_writes(requests, float(rate), life, renews)
        costs[life] = prefix_cost(prices, life, requests, writes, 1)
    return min(costs, key=lambda life: costs[life])


def _plain_write_read(prices: Prices, ttl: CacheTTL) -> tuple[Fraction, Fraction, Fraction]:
    """Return the prices of a token: (uncached, written, read)."""
    return prices.token_price("input"), prices.token_price(ttl.kind), prices.token_price("cache_read")
