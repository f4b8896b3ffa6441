"""Token usage of requests by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

KINDS = ("input", "cache_write_5m", "cache_write_1h", "cache_read", "output")
token_counts = attrgetter(*KINDS)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens by kind, each counted once: `input` are those neither read from nor written to the cache."""

    input: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    cache_read: int = 0
    output: int = 0

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((kind, getattr(self, kind)) for kind in KINDS)

    def __add__(self, other: Usage) -> Usage:
        return total_usage((self, other))

    @property
    def written(self) -> int:
        return self.cache_write_5m + self.cache_write_1h

    @property
    def prompt(self) -> int:
        """Return all input tokens, whatever their price."""
        return self.input + self.written + self.cache_read


def total_usage(usages: Iterable[Usage]) -> Usage:
    columns = zip(*(token_counts(usage) for usage in usages), strict=True)
    return Usage(*map(sum, columns))
