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
class KVCacheGroup:
    """The pages of `layers`, which a sequence holds in the order of its positions.

    A query at position t reads from them positions p < settled(t + 1) with p >= reach(t) or p < first.
    """

    layers: tuple[int, ...] = ()
    sliding_window: int | None = None  # a query at position t reads positions above t - back only; None: all
    num_sink_tokens: int = 0  # and these first positions, whatever the distance
    residual_length: int = 0  # positions it receives late
    quant_group: int = 1  # and only whole groups of so many
    stride: int = 1  # positions fall out of `back` by whole groups of so many, as soon as the last of a group does not:
    # in the residual of a quantized cache a group is read as long as another table has not received it

    def __post_init__(self) -> None:
        if (self.sliding_window is not None and self.sliding_window < 1) or min(self.num_sink_tokens, self.residual_length) < 0 or self.quant_group < 1:
            raise ValueError(f"back and group must be at least 1, first and lag at least 0: {self}")
        if self.stride < 1 or (self.stride > 1 and (self.sliding_window is None or self.sliding_window < self.stride)):
            raise ValueError(f"stride must be at least 1, and no more than back: {self}")

    @property
    def is_delayed(self) -> bool:
        """Return whether positions reach this group later than they are computed."""
        return self.residual_length > 0 or self.quant_group > 1

    def quantized_until(self, computed: int) -> int:
        """Return the end of the positions [0, end) that it holds when `computed` tokens are known."""
        return max(0, (computed - self.residual_length) // self.quant_group * self.quant_group)

    def first_visible(self, position: int) -> int:
        """The lowest position, but for the `first` ones, that a query at `position` or later reads."""
        return 0 if self.sliding_window is None else max(0, -((self.sliding_window - 1 - position) // self.stride) * self.stride)

    def out_of_window_pages(self, computed: int, page_size: int) -> range:
        """Return the page indices in the sequence that no query from position `computed` on reads."""
        front = pages_for(self.num_sink_tokens, page_size)
        return range(front, max(front, min(self.first_visible(computed), self.quantized_until(computed)) // page_size))

    def pages_needed(self, start: int, end: int, page_size: int) -> tuple[range, range]:
        """Return the page indices that a step over positions [start, end) reads or writes: those of the sinks, and the
        others.

        With start = end = m: the pages that a prefix of m tokens needs before position m can be computed.
        """
        stop = pages_for(self.quantized_until(end), page_size)
        front = min(pages_for(self.num_sink_tokens, page_size), stop)
        return range(front), range(max(front, min(self.first_visible(start), self.quantized_until(start)) // page_size), stop)

    def pages_written(self, start: int, end: int, page_size: int) -> range:
        """Return the page indices that a step over positions [start, end) writes."""
        low, high = self.quantized_until(start), self.quantized_until(end)
        return range(low // page_size, pages_for(high, page_size)) if high > low else range(0)

    def next_page_boundary(self, computed: int, page_size: int) -> int:
        """Return the number of known tokens, above `computed`, at which another page becomes full or unreachable."""
        full = (self.quantized_until(computed) // page_size + 1) * page_size
        full = -(-full // self.quant_group) * self.quant_group + self.residual_length
        if self.sliding_window is None:
            return full
        beyond = -(-(self.first_visible(computed) // page_size + 1) * page_size // self.stride)  # groups until another page is left
        return min(full, (beyond - 1) * self.stride + self.sliding_window)

    def max_pages(self, tokens: int, max_chunk_tokens: int, page_size: int) -> int:
        """Return the most pages that a sequence of `tokens` tokens needs at once, with at most `max_chunk_tokens`
        tokens per step."""
        stop = self.quantized_until(tokens)
        if self.sliding_window is None:
            return pages_for(stop, page_size)
        front = pages_for(self.num_sink_tokens, page_size)
        # The longest run of positions that one step touches, laid where it meets the most pages: at the last place in
        # the first page behind `first` where a stride may begin, or where the text is too short for that, at its end.
        length = min(stop, max(self.sliding_window, self.residual_length + self.quant_group) - 1 - self.residual_length + max_chunk_tokens)
        if length < 1:
            return 0
        latest = front * page_size + page_size - math.gcd(self.stride, page_size)
        begin = min(-(-(stop - length) // self.stride) * self.stride, latest)
        return (min(begin + length, stop) - 1) // page_size + 1


def build_cache_groups(layers: Iterable[Mapping[int, KVCacheGroup]]) -> tuple[KVCacheGroup, ...]:
    """Build the cache groups from each layer's groups by number; layers of one group must agree."""
    held: dict[int, KVCacheGroup] = {}
    for index, tables in enumerate(layers):
        for number, table in tables.items():
            known = held.setdefault(number, table)
            if replace(known, layers=()) != table:
                raise ValueError(f"layers of cache group {number} differ in window, sinks or format: {known}, {table}")
            held[number] = replace(known, layers=(*known.layers, index))
    return tuple(held.get(number, KVCacheGroup()) for number in range(max(held, default=-1) + 1))
