"""A vendor's prompt cache: what a request reads and writes, by when the requests come.

An entry is a whole beginning of a prompt. It lives for as long as was paid for, counted from when it was written or,
where a hit renews it, from when it was last read: written at second 0 for 300, it is
read before second 300 and not at it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from workbench.economics.usage import Usage
from workbench.errors import WorkbenchError

Seconds = float | Fraction


@dataclass(frozen=True, slots=True)
class Life:
    """How long an entry lives, and which price its write has."""

    name: str
    seconds: int
    kind: str


FIVE_MINUTES = Life("5 minutes", 300, "cache_write_5m")
ONE_HOUR = Life("1 hour", 3600, "cache_write_1h")
LIVES = (FIVE_MINUTES, ONE_HOUR)


@dataclass(frozen=True, slots=True)
class Call:
    """One request: the pieces of its prompt that may be cached, in order, each what it is and its tokens; then `input`
    tokens that are like no other's, and `output`."""

    time: Seconds
    pieces: tuple[tuple[Hashable, int], ...] = ()
    input: int = 0
    output: int = 0

    @property
    def cacheable(self) -> int:
        return sum(tokens for _, tokens in self.pieces)


class PromptCache:
    """Serves calls in order of time. What a call reads is the longest entry it begins with; the pieces after that are
    written, so that each of them ends an entry of its own."""

    def __init__(self, life: Life, renews: bool = True):
        self.life, self.renews = life, renews
        self._names: dict[tuple[int, Hashable], int] = {}  # (the beginning before, a piece) -> the beginning
        self._ends: dict[int, Seconds] = {}  # when the entry of a beginning ends
        self._now: Seconds | None = None

    def serve(self, call: Call) -> Usage:
        if self._now is not None and call.time < self._now:
            raise WorkbenchError(f"a request at second {call.time} after one at {self._now}: give them in order")
        self._now = call.time
        path = self._path(call)
        found = max((at for at, name in enumerate(path, 1) if self._ends.get(name, call.time) > call.time), default=0)
        for at, name in enumerate(path, 1):
            if at > found or self.renews:
                self._ends[name] = call.time + self.life.seconds
        read = sum(tokens for _, tokens in call.pieces[:found])
        return Usage(
            input=call.input, cache_read=read, output=call.output, **{self.life.kind: call.cacheable - read}
        )

    def _path(self, call: Call) -> list[int]:
        """The beginnings that the call's pieces end, by name."""
        path, before = [], 0
        for piece, _ in call.pieces:
            before = self._names.setdefault((before, piece), len(self._names) + 1)
            path.append(before)
        return path


def cached(calls: Iterable[Call], life: Life, renews: bool = True) -> Iterator[Usage]:
    """What each call uses under a prompt cache."""
    cache = PromptCache(life, renews)
    return map(cache.serve, calls)


def uncached(calls: Iterable[Call]) -> Iterator[Usage]:
    """What each call uses without one."""
    return (Usage(input=call.cacheable + call.input, output=call.output) for call in calls)
