"""What the pages of one table hold, and which of them a query still needs. Integers only.

    page      0      1      2      3      4      5      6
            | first  |  given back  | back .............. |      a window with first positions, computed up to here ^
            | settled .................... | not yet      |      a table that receives its positions late
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from workbench.cache.pages import pages_for


@dataclass(frozen=True)
class Table:
    """The pages of `layers`, which a sequence holds in the order of its positions.

    A query at position t reads from them positions p < settled(t + 1) with p > t - back or p < first.
    """

    layers: tuple[int, ...] = ()
    back: int | None = None  # a query at position t reads positions above t - back only; None: all
    first: int = 0  # and these first positions, whatever the distance
    lag: int = 0  # positions it receives late
    group: int = 1  # and only whole groups of so many

    def __post_init__(self) -> None:
        if (self.back is not None and self.back < 1) or min(self.first, self.lag) < 0 or self.group < 1:
            raise ValueError(f"back and group must be at least 1, first and lag at least 0: {self}")

    @property
    def late(self) -> bool:
        """Whether it receives positions later than they are computed."""
        return self.lag > 0 or self.group > 1

    def settled(self, computed: int) -> int:
        """With `computed` tokens known it holds positions [0, settled)."""
        return max(0, (computed - self.lag) // self.group * self.group)

    def reach(self, position: int) -> int:
        """The lowest position, but for the `first` ones, that a query at `position` or later reads."""
        return 0 if self.back is None else max(0, position - self.back + 1)

    def dead(self, computed: int, size: int) -> range:
        """Pages, by their place in the sequence, that no query from position `computed` on reads."""
        front = pages_for(self.first, size)
        return range(front, max(front, min(self.reach(computed), self.settled(computed)) // size))

    def held(self, start: int, end: int, size: int) -> tuple[range, range]:
        """Places that a step over positions [start, end) reads or writes: of the `first` positions, and the others.

        With start = end = m: what must be there of a prefix of m tokens before position m can be computed.
        """
        stop = pages_for(self.settled(end), size)
        front = min(pages_for(self.first, size), stop)
        return range(front), range(max(front, min(self.reach(start), self.settled(start)) // size), stop)

    def written(self, start: int, end: int, size: int) -> range:
        """Places that a step over positions [start, end) writes to."""
        low, high = self.settled(start), self.settled(end)
        return range(low // size, pages_for(high, size)) if high > low else range(0)

    def changes(self, computed: int, size: int) -> int:
        """With how many tokens known, above `computed`, another page is full or dead for the first time."""
        full = (self.settled(computed) // size + 1) * size
        full = -(-full // self.group) * self.group + self.lag
        if self.back is None:
            return full
        return min(full, (self.reach(computed) // size + 1) * size + self.back - 1)

    def most(self, tokens: int, chunk: int, size: int) -> int:
        """Pages that one sequence of `tokens` needs at once, at most, when a step computes `chunk` of them at most."""
        stop = self.settled(tokens)
        if self.back is None:
            return pages_for(stop, size)
        front = pages_for(self.first, size)
        # The longest run of positions that one step touches, laid where it meets the most pages.
        length = min(stop, max(self.back, self.lag + self.group) - 1 - self.lag + chunk)
        if length < 1:
            return 0
        begin = min(stop - length, front * size + size - 1)
        return (begin + length - 1) // size + 1


def tables_of(layers: Iterable[Mapping[int, Table]]) -> tuple[Table, ...]:
    """The tables of these layers, each with the layers that are in it; a layer says what it holds in which table."""
    held: dict[int, Table] = {}
    for index, tables in enumerate(layers):
        for number, table in tables.items():
            known = held.setdefault(number, table)
            if replace(known, layers=()) != table:
                raise ValueError(f"layers of table {number} differ in window, sinks or format: {known}, {table}")
            held[number] = replace(known, layers=(*known.layers, index))
    return tuple(held.get(number, Table()) for number in range(max(held, default=-1) + 1))
