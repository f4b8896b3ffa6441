"""The bill of a workload: the usage of each request, priced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from workbench.economics.prices import Prices
from workbench.economics.usage import Usage, total_usage


@dataclass(frozen=True)
class Bill:
    """Priced usage of many requests. `total` is exact: the sum over requests and the sum over kinds of tokens."""

    prices: Prices
    usages: tuple[Usage, ...]  # a request each, in order

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
    def request_costs(self) -> Iterator[Fraction]:
        """Yield the cost of each request."""
        return map(self.prices.cost, self.usages)

    @property
    def cost_by_kind(self) -> dict[str, Fraction]:
        """Return the cost by kind of tokens, of the kinds used."""
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
        """Return the saving against `other`; negative where this bill is larger."""
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
