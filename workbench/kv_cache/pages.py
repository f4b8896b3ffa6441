"""Allocate pages of the KV cache, count their references, and compute which positions a cache group stores. Integers
only, no tensors.

    page      0      1      2      3      4      5      6
            | sinks  |  freed     | sliding window ...... |      a window with sink tokens, computed up to here ^
            | quantized ................. | residual     |      a quantized group receives its positions late

`PageTransfers` lists the copies and evictions that precede a step.
"""

from __future__ import annotations

import math
from collections import OrderedDict, abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.errors import WorkbenchError
from workbench.request import Sequence

NULL_PAGE = 0  # never allocated: padding rows write there and unused table entries point there


def pages_for(tokens: int, page_size: int) -> int:
    """Return the number of pages that `tokens` tokens take."""
    return -(-tokens // page_size)


class PagePool:
    """A pool of fixed-size pages of one cache group, with a reference count per page.

        page       0 (null) | 1 .............................. num_pages |
        ref_count  -        | 0 = free, n = shared by n                  |
        cached     -        | one of the references is the prefix cache  |   evictable = cached, with no other reference

    Invariant: num_free + num_used + len(evictable) = num_pages. A page with several references must not be written.
    `evictable` is in least-recently-used order.
    """

    def __init__(self, num_pages: int, page_size: int, order: abc.Sequence[int] | None = None):
        """Create a pool of `num_pages` free pages of `page_size` tokens.

        Args:
            num_pages: pages besides the null page.
            page_size: tokens per page.
            order: order in which free pages are first handed out; a permutation of 1..num_pages.
        """
        if num_pages < 1 or page_size < 1:
            raise WorkbenchError(f"a page pool needs pages and tokens a page, not {num_pages} and {page_size}")
        if order is not None and sorted(order) != list(range(1, num_pages + 1)):
            raise ValueError(f"order must be a permutation of 1..{num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self._free = list(reversed(order)) if order is not None else list(range(num_pages, 0, -1))
        self._holders = [0] * (num_pages + 1)
        self._kept = bytearray(num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Return the number of pages that sequences can get: free pages, and evictable pages of the prefix cache."""
        return len(self._free) + len(self.evictable)

    @property
    def num_used(self) -> int:
        """Return the number of pages referenced by sequences."""
        return self.num_pages - self.num_available

    def ref_count(self, page: int) -> int:
        return self._holders[page]

    def is_cached(self, page: int) -> bool:
        return bool(self._kept[page])

    def is_idle(self, page: int) -> bool:
        """Return whether only the prefix cache references the page."""
        return page in self.evictable

    def ref_counts(self) -> tuple[list[int], bytes]:
        """Return two copies, with an entry for each page: of the reference counts, and of the cached flags. The null
        page has 0.
        """
        return self._holders.copy(), bytes(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference.

        Raises:
            ValueError: if fewer pages are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages requested, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def acquire(self, pages: Iterable[int]) -> None:
        """Add one reference to each of `pages`, which must have one already."""
        for page in pages:
            self._check_held(page)
            self._holders[page] += 1
            self.evictable.pop(page, None)

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drop one reference from each of `pages`; return the pages that became free."""
        freed = []
        for page in pages:
            self._check_held(page)
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
                freed.append(page)
            elif self._holders[page] == 1 and self._kept[page]:
                self.evictable[page] = None
        return freed

    def mark_cached(self, page: int) -> None:
        """Add the prefix cache's reference to a page that a sequence holds."""
        if self._kept[page]:
            raise ValueError(f"page {page} is kept already")
        self.acquire([page])
        self._kept[page] = 1

    def unmark_cached(self, page: int) -> list[int]:
        """Drop the prefix cache's reference to a page; return the page if it became free."""
        if not self._kept[page]:
            raise ValueError(f"page {page} is not kept")
        self._kept[page] = 0
        self.evictable.pop(page, None)
        return self.release([page])

    def _check_held(self, page: int) -> None:
        if not 1 <= page <= self.num_pages or self._holders[page] < 1:
            raise ValueError(f"page {page} is not referenced")


@dataclass(frozen=True)
class KVCacheGroup:
    """A group of layers, `layers`, that share page numbers: a sequence has the same pages in each, in the order of its
    positions.

    A query at position t reads from these pages the positions p < quantized_until(t + 1) with p >= first_visible(t) or
    p < num_sink_tokens.
    """

    layers: tuple[int, ...] = ()
    sliding_window: int | None = None  # a query at position t reads positions > t - sliding_window; None: all
    num_sink_tokens: int = 0  # first positions that are read at any distance
    residual_length: int = 0  # a position is stored once this many later positions are known
    quant_group: int = 1  # positions are stored in whole groups of this many
    stride: int = 1  # positions leave the window in whole groups of this many, when the first of a group leaves:
    # in the residual of a quantized cache, a group is read until the quantized cache group has received it
    is_recurrent: bool = False  # a page holds the layers' states after its last computed token (see recurrent.py)

    def __post_init__(self) -> None:
        if (
            (self.sliding_window is not None and self.sliding_window < 1)
            or min(self.num_sink_tokens, self.residual_length) < 0
            or self.quant_group < 1
        ):
            raise ValueError(
                "sliding_window and quant_group must be at least 1, "
                f"num_sink_tokens and residual_length at least 0: {self}"
            )
        if self.stride < 1 or (self.stride > 1 and (self.sliding_window is None or self.sliding_window < self.stride)):
            raise ValueError(f"stride must be at least 1, and no more than sliding_window: {self}")
        if self.is_recurrent and replace(self, layers=(), is_recurrent=False) != KVCacheGroup(sliding_window=2):
            raise ValueError(f"a recurrent group reads the state after the token before, a window of 2: {self}")

    @classmethod
    def of_states(cls, layers: tuple[int, ...] = ()) -> KVCacheGroup:
        """Return the cache group of recurrent layers: a step reads only the page with the state after the previous
        token.
        """
        return cls(layers, sliding_window=2, is_recurrent=True)

    @property
    def is_delayed(self) -> bool:
        """Return whether this group stores positions later than they are computed."""
        return self.residual_length > 0 or self.quant_group > 1

    def quantized_until(self, computed: int) -> int:
        """Return the end of the positions [0, end) that this group stores when `computed` tokens are known."""
        return max(0, (computed - self.residual_length) // self.quant_group * self.quant_group)

    def first_visible(self, position: int) -> int:
        """Return the lowest position, sink tokens excluded, that a query at `position` or later reads."""
        return (
            0
            if self.sliding_window is None
            else max(0, -((self.sliding_window - 1 - position) // self.stride) * self.stride)
        )

    def out_of_window_pages(self, computed: int, page_size: int) -> range:
        """Return the indices, in the sequence's page list, of the pages that no query from position `computed` on
        reads.
        """
        front = pages_for(self.num_sink_tokens, page_size)
        return range(front, max(front, min(self.first_visible(computed), self.quantized_until(computed)) // page_size))

    def pages_needed(self, start: int, end: int, page_size: int) -> tuple[range, range]:
        """Return two ranges of indices in the sequence's page list, which a step over positions [start, end) reads or
        writes: the pages of sinks, and all other pages.

        With start = end = m: the pages that a prefix of m tokens needs before position m can be computed.
        """
        stop = pages_for(self.quantized_until(end), page_size)
        front = min(pages_for(self.num_sink_tokens, page_size), stop)
        return range(front), range(
            max(front, min(self.first_visible(start), self.quantized_until(start)) // page_size), stop
        )

    def next_page_boundary(self, computed: int, page_size: int) -> int:
        """Return the first number of known tokens, above `computed`, at which another page becomes full or
        unreachable.
        """
        full = (self.quantized_until(computed) // page_size + 1) * page_size
        full = -(-full // self.quant_group) * self.quant_group + self.residual_length
        if self.sliding_window is None:
            return full
        beyond = -(
            -(self.first_visible(computed) // page_size + 1) * page_size // self.stride
        )  # with strides: the end of the next page to leave the window
        return min(full, (beyond - 1) * self.stride + self.sliding_window)

    def num_pages(self, computed: int, known: int, max_chunk_tokens: int, page_size: int, drafted: int = 0) -> int:
        """Return the length of a sequence's page list for the step from `computed` to `known` tokens, followed by
        `drafted` draft tokens.
        """
        cut = self.sliding_window is not None and known > computed + max_chunk_tokens
        return pages_for(self.quantized_until(computed + max_chunk_tokens if cut else known + drafted), page_size)

    def max_pages(self, tokens: int, max_chunk_tokens: int, page_size: int) -> int:
        """Return the maximum number of pages that a sequence of `tokens` tokens needs at once, with at most
        `max_chunk_tokens` tokens per step. For states it is two: one that a step reads and one that it writes.
        """
        if self.is_recurrent:
            return min(tokens, 2)
        stop = self.quantized_until(tokens)
        if self.sliding_window is None:
            return pages_for(stop, page_size)
        front = pages_for(self.num_sink_tokens, page_size)
        # Place the longest run of positions of one step where it touches the most pages: at the last position of the
        # first page after the sink tokens where a stride may begin, or at the end of a shorter text.
        length = min(
            stop,
            max(self.sliding_window, self.residual_length + self.quant_group)
            - 1
            - self.residual_length
            + max_chunk_tokens,
        )
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


class Eviction(NamedTuple):
    """An eviction that keeps `num_after` of the `num_before` tokens of `sequence`, in the first slots of `pages`."""

    sequence: Sequence
    num_before: int
    num_after: int
    pages: tuple[list[int], ...]


@dataclass
class PageTransfers:
    """The page transfers of one step, in order of execution: evictions, swap-outs to CPU, copies, swap-ins from CPU.

    The source page of a swap-out or copy may have a new owner already, but it has not been written yet.
    """

    evictions: list[Eviction] = field(default_factory=list)
    swap_outs: list[tuple[int, int, int]] = field(default_factory=list)  # (group, page, CPU page)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (group, page, the page for the copy)
    swap_ins: list[tuple[str, int, int, int]] = field(default_factory=list)  # (request, group, CPU page, page)

    def __bool__(self) -> bool:
        return bool(self.evictions or self.swap_outs or self.copies or self.swap_ins)

    def source_page(self, group: int, page: int) -> int:
        """Return the page that has the contents of `page` until these transfers are executed."""
        return next((s for t, s, target in self.copies if (t, target) == (group, page)), page)

    def source_cpu_page(self, group: int, page: int) -> int | None:
        """Return the CPU page from which `page` will be loaded; None if it will not be."""
        return next((place for _, t, place, target in self.swap_ins if (t, target) == (group, page)), None)

    def copy(self, request_id: str, group: int, page: int, target: int) -> None:
        """Plan a copy of `page` to `target`. If `page` itself has yet to be loaded from a CPU page, plan to load that
        CPU page into `target`.
        """
        place = self.source_cpu_page(group, page)
        if place is None:
            self.copies.append((group, page, target))
        else:
            self.swap_ins.append((request_id, group, place, target))

    def drop_targets(self, group: int, pages: set[int]) -> None:
        """Drop the planned transfers into `pages`, which were freed."""
        self.copies = [copy for copy in self.copies if copy[0] != group or copy[2] not in pages]
        self.swap_ins = [load for load in self.swap_ins if load[1] != group or load[3] not in pages]
