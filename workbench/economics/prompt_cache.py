"""A vendor's prompt cache: reads and writes of requests by their times.

An entry is a whole prefix of a prompt. It lives for the paid TTL, counted from its write or, where hits renew it, from
its last read. An entry written at second 0 for 300 is read before second 300 and not at it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from workbench.economics.usage import Usage
from workbench.errors import WorkbenchError

Seconds = float | Fraction


@dataclass(frozen=True, slots=True)
class CacheTTL:
    """A TTL of cache entries, and the kind of price that its write has."""

    name: str
    seconds: int
    kind: str


FIVE_MINUTES = CacheTTL("5 minutes", 300, "cache_write_5m")
ONE_HOUR = CacheTTL("1 hour", 3600, "cache_write_1h")
CACHE_TTLS = (FIVE_MINUTES, ONE_HOUR)


@dataclass(frozen=True, slots=True)
class PromptCall:
    """One request: cacheable `segments` of its prompt in order, each a name and its tokens; then `input` tokens of its
    own, and `output`."""

    time: Seconds
    segments: tuple[tuple[Hashable, int], ...] = ()
    input: int = 0
    output: int = 0

    @property
    def cacheable(self) -> int:
        return sum(tokens for _, tokens in self.segments)


class PromptCache:
    """A prompt cache that serves calls in order of time.

    A call reads the longest entry that is a prefix of it. The segments after that are written, each as the end of an
    entry of its own."""

    def __init__(self, ttl: CacheTTL, renews: bool = True):
        self.ttl, self.renews = ttl, renews
        self._names: dict[tuple[int, Hashable], int] = {}  # (the beginning before, a piece) -> the beginning
        self._ends: dict[int, Seconds] = {}  # when the entry of a beginning ends
        self._now: Seconds | None = None

    def serve(self, call: PromptCall) -> Usage:
        if self._now is not None and call.time < self._now:
            raise WorkbenchError(f"a request at second {call.time} after one at {self._now}: give them in order")
        self._now = call.time
        path = self._path(call)
        found = max((at for at, name in enumerate(path, 1) if self._ends.get(name, call.time) > call.time), default=0)
        for at, name in enumerate(path, 1):
            if at > found or self.renews:
                self._ends[name] = call.time + self.ttl.seconds
        read = sum(tokens for _, tokens in call.segments[:found])
        return Usage(
            input=call.input, cache_read=read, output=call.output, **{self.ttl.kind: call.cacheable - read}
        )

    def _path(self, call: PromptCall) -> list[int]:
        """Return the ids of the prefixes that the call's segments end."""
        path, before = [], 0
        for piece, _ in call.segments:
            before = self._names.setdefault((before, piece), len(self._names) + 1)
            path.append(before)
        return path


def cached_usage(calls: Iterable[PromptCall], ttl: CacheTTL, renews: bool = True) -> Iterator[Usage]:
    """Yield the usage of each call with a prompt cache."""
    cache = PromptCache(ttl, renews)
    return map(cache.serve, calls)


def uncached_usage(calls: Iterable[PromptCall]) -> Iterator[Usage]:
    """Yield the usage of each call without a prompt cache."""
    return (Usage(input=call.cacheable + call.input, output=call.output) for call in calls)
