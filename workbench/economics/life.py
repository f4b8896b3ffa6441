"""When a prompt cache pays, in closed form: break-even, the hits to expect, and which life to buy.

`x` below is requests a life: the rate times how long an entry lives. Of a Poisson process a request finds the entry
with probability 1 - exp(-x) where hits renew it (the gap before it is shorter than a life), and x / (1 + x) in the long
run where they do not (each write is followed by x reads in the mean).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from workbench.economics.prices import Prices
from workbench.economics.prompt_cache import LIVES, Life


@dataclass(frozen=True)
class BreakEven:
    """`crossing` is where w + (n - 1) r = n p: a write and reads of the rest against the plain price, n requests in one
    life. `request` is the first at which caching is cheaper, `read` the number of its read; None where it never is."""

    crossing: Fraction | None
    request: int | None

    @property
    def read(self) -> int | None:
        return None if self.request is None else self.request - 1


def break_even(prices: Prices, life: Life) -> BreakEven:
    plain, write, read = _three(prices, life)
    if write < plain:
        return BreakEven(None, 1)  # cheaper from the first, whatever a read costs
    if read >= plain:
        return BreakEven(None, None)
    crossing = (write - read) / (plain - read)
    return BreakEven(crossing, math.floor(crossing) + 1)


def hit_share_to_pay(prices: Prices, life: Life) -> Fraction | None:
    """The share of requests that must hit for caching to cost as much as none: below 0 it always costs less, above 1
    never. None where a read costs as much as a write, so that hits save nothing."""
    plain, write, read = _three(prices, life)
    return (write - plain) / (write - read) if write > read else None


def hits_a_write_to_pay(prices: Prices, life: Life) -> Fraction | None:
    """Reads that each write must be followed by, in the mean, for caching to cost as much as none; None where a read
    costs as much as the plain price."""
    plain, write, read = _three(prices, life)
    return (write - plain) / (plain - read) if plain > read else None


def even_writes(requests: int, gap: Fraction, life: Life, renews: bool = True) -> int:
    """Writes among requests that are `gap` seconds apart."""
    if gap >= life.seconds:
        return requests
    return 1 if renews else math.ceil(Fraction(requests, math.ceil(life.seconds / gap)))


def poisson_hit_share(rate: float, life: Life, renews: bool = True) -> float:
    """The share of requests that hit, `rate` of them a second, in the long run."""
    x = rate * life.seconds
    return -math.expm1(-x) if renews else x / (1 + x)


def poisson_writes(requests: int, rate: float, life: Life, renews: bool = True) -> float:
    """Writes to expect among the first `requests` of a Poisson process. Exact where hits renew; where they do not, the
    renewal theorem's first two terms, a cycle being 1 + Poisson(x) requests."""
    x = rate * life.seconds
    if renews:
        return 1 + (requests - 1) * math.exp(-x)
    return min(requests, max(1.0, requests / (1 + x) + x * (2 + x) / (2 * (1 + x) ** 2)))


def prefix_cost(prices: Prices, life: Life | None, requests: int, writes: float | int, tokens: int) -> float:
    """What a prompt of `tokens` costs in `requests`, of which `writes` write it; without a life, plain."""
    if life is None:
        return float(requests * tokens * prices.a_token("input"))
    _, write, read = _three(prices, life)
    return tokens * (writes * float(write) + (requests - writes) * float(read))


def best_life(
    prices: Prices, rate: float | Fraction, requests: int, renews: bool = True, arrivals: str = "poisson",
    lives: Iterable[Life] = LIVES,
) -> Life | None:  # fmt: skip
    """The life that makes `requests` cheapest, `rate` of them a second, evenly or at random; None: do not cache."""
    costs: dict[Life | None, float] = {None: prefix_cost(prices, None, requests, 0, 1)}
    for life in lives:
        if getattr(prices, life.kind) is None:
            continue
        if arrivals == "even":
            writes = even_writes(requests, 1 / Fraction(rate), life, renews)
        else:
            writes = poisson_writes(requests, float(rate), life, renews)
        costs[life] = prefix_cost(prices, life, requests, writes, 1)
    return min(costs, key=lambda life: costs[life])


def _three(prices: Prices, life: Life) -> tuple[Fraction, Fraction, Fraction]:
    """A token plain, written and read."""
    return prices.a_token("input"), prices.a_token(life.kind), prices.a_token("cache_read")
