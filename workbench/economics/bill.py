"""The bill of a workload: what each of its requests used, priced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from workbench.economics.prices import Prices
from workbench.economics.usage import Usage, total


@dataclass(frozen=True)
class Bill:
    """`total` is the sum over the requests and the sum over the kinds, exactly."""

    prices: Prices
    usages: tuple[Usage, ...]  # a request each, in order

    @classmethod
    def of(cls, prices: Prices, usages: Iterable[Usage]) -> Bill:
        return cls(prices, tuple(usages))

    @cached_property
    def usage(self) -> Usage:
        return total(self.usages)

    @cached_property
    def total(self) -> Fraction:
        return self.prices.cost(self.usage)

    @property
    def each(self) -> Iterator[Fraction]:
        """What each request costs."""
        return map(self.prices.cost, self.usages)

    @property
    def kinds(self) -> dict[str, Fraction]:
        """What the tokens of each kind cost, of those that were used."""
        return {kind: count * self.prices.a_token(kind) for kind, count in self.usage if count}

    @property
    def writes(self) -> int:
        """Requests that wrote to the cache."""
        return sum(1 for usage in self.usages if usage.written)

    @property
    def reads(self) -> int:
        """Requests that read from it."""
        return sum(1 for usage in self.usages if usage.cache_read)

    def saves(self, other: Bill) -> Fraction:
        """How much less this is than `other`; negative where it is more."""
        return other.total - self.total

    def as_dict(self) -> dict[str, Any]:
        return {
            "total": float(self.total),
            "requests": len(self.usages),
            "requests_that_write": self.writes,
            "requests_that_read": self.reads,
            "tokens": dict(self.usage),
            "by_kind": {kind: float(cost) for kind, cost in self.kinds.items()},
        }
