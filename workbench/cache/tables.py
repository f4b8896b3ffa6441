"""Describe which positions the pages of a cache group hold, and which of them a query still reads. Integers only.

    page      0      1      2      3      4      5      6
            | sinks  |  freed     | sliding window ...... |      a window with sink tokens, computed up to here ^
            | quantized ................. | residual     |      a quantized group receives its positions late
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from workbench.cache.pages import pages_for


@dataclass(frozen=True)
class Table:
    """The pages of `layers`, which a sequence holds in the order of its positions.

    A query at position t reads from them positions p < settled(t + 1) with p >= reach(t) or p < first.
    """

    layers: tuple[int, ...] = ()
    back: int | None = None  # a query at position t reads positions above t - back only; None: all
    first: int = 0  # and these first positions, whatever the distance
    lag: int = 0  # positions it receives late
    group: int = 1  # and only whole groups of so many
    stride: int = 1  # positions fall out of `back` by whole groups of so many, as soon as the last of a group does not:
    # in the residual of a quantized cache a group is read as long as another table has not received it

    def __post_init__(self) -> None:
        if (self.back is not None and self.back < 1) or min(self.first, self.lag) < 0 or self.group < 1:
            raise ValueError(f"back and group must be at least 1, first and lag at least 0: {self}")
        if self.stride < 1 or (self.stride > 1 and (self.back is None or self.back < self.stride)):
            raise ValueError(f"stride must be at least 1, and no more than back: {self}")

    @property
    def late(self) -> bool:
        """Return whether positions reach this group later than they are computed."""
        return self.lag > 0 or self.group > 1

    def settled(self, computed: int) -> int:
        """Return the end of the positions [0, end) that it holds when `computed` tokens are known."""
        return max(0, (computed - self.lag) // self.group * self.group)

    def reach(self, position: int) -> int:
        """The lowest position, but for the `first` ones, that a query at `position` or later reads."""
        return 0 if self.back is None else max(0, -((self.back - 1 - position) // self.stride) * self.stride)

    def dead(self, computed: int, size: int) -> range:
        """Return the page indices in the sequence that no query from position `computed` on reads."""
        front = pages_for(self.first, size)
        return range(front, max(front, min(self.reach(computed), self.settled(computed)) // size))

    def held(self, start: int, end: int, size: int) -> tuple[range, range]:
        """Return the page indices that a step over positions [start, end) reads or writes: those of the sinks, and the
        others.

        With start = end = m: the pages that a prefix of m tokens needs before position m can be computed.
        """
        stop = pages_for(self.settled(end), size)
        front = min(pages_for(self.first, size), stop)
        return range(front), range(max(front, min(self.reach(start), self.settled(start)) // size), stop)

    def written(self, start: int, end: int, size: int) -> range:
        """Return the page indices that a step over positions [start, end) writes."""
        low, high = self.settled(start), self.settled(end)
        return range(low // size, pages_for(high, size)) if high > low else range(0)

    def changes(self, computed: int, size: int) -> int:
        """Return the number of known tokens, above `computed`, at which another page becomes full or unreachable."""
        full = (self.settled(computed) // size + 1) * size
        full = -(-full // self.group) * self.group + self.lag
        if self.back is None:
            return full
        beyond = -(-(self.reach(computed) // size + 1) * size // self.stride)  # groups until another page is left
        return min(full, (beyond - 1) * self.stride + self.back)

    def most(self, tokens: int, chunk: int, size: int) -> int:
        """Return the most pages that a sequence of `tokens` tokens needs at once, with at most `max_chunk_tokens`
        tokens per step."""
        stop = self.settled(tokens)
        if self.back is None:
            return pages_for(stop, size)
        front = pages_for(self.first, size)
        # The longest run of positions that one step touches, laid where it meets the most pages: at the last place in
        # the first page behind `first` where a stride may begin, or where the text is too short for that, at its end.
        length = min(stop, max(self.back, self.lag + self.group) - 1 - self.lag + chunk)
        if length < 1:
            return 0
        latest = front * size + size - math.gcd(self.stride, size)
        begin = min(-(-(stop - length) // self.stride) * self.stride, latest)
        return (min(begin + length, stop) - 1) // size + 1


def tables_of(layers: Iterable[Mapping[int, Table]]) -> tuple[Table, ...]:
    """Build the cache groups from each layer's groups by number; layers of one group must agree."""
    held: dict[int, Table] = {}
    for index, tables in enumerate(layers):
        for number, table in tables.items():
            known = held.setdefault(number, table)
            if replace(known, layers=()) != table:
                raise ValueError(f"layers of table {number} differ in window, sinks or format: {known}, {table}")
            held[number] = replace(known, layers=(*known.layers, index))
    return tuple(held.get(number, Table()) for number in range(max(held, default=-1) + 1))
