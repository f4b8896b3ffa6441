"""Allocate pages of the KV cache and count references. Integers only, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from workbench.errors import WorkbenchError

NULL_PAGE = 0  # never allocated: padding rows write there and unused table entries point there


def pages_for(tokens: int, page_size: int) -> int:
    """Return the number of pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class PagePool:
    """A pool of fixed-size pages of one cache group, with a reference count per page.

        page       0 (null) | 1 .............................. num_pages |
        ref_count  -        | 0 = free, n = shared by n                  |
        cached     -        | one of the references is the prefix cache  |   evictable = cached, with no other reference

    Invariant: num_free + num_used + len(evictable) = num_pages. A page with several references must not be written.
    `evictable` is in least-recently-used order.
    """

    def __init__(self, num_pages: int, page_size: int, order: Sequence[int] | None = None):
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
        """Return the pages that a sequence can have: free pages, and evictable ones once the prefix cache
        drops them."""
        return len(self._free) + len(self.evictable)

    @property
    def num_used(self) -> int:
        """Return the number of pages referenced by sequences."""
        return self.num_pages - self.num_available

    def ref_count(self, page: int) -> int:
        return self._holders[page]

    def is_cached(self, page: int) -> bool:
        return bool(self._kept[page])

    def ref_counts(self) -> tuple[list[int], bytes]:
        """Return copies of the reference counts and cached flags of every page; the null page has 0."""
        return self._holders.copy(), bytes(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference.

        Raises:
            ValueError: if fewer pages are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
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
        """Drop the prefix cache's reference; return the page if that freed it."""
        if not self._kept[page]:
            raise ValueError(f"page {page} is not kept")
        self._kept[page] = 0
        self.evictable.pop(page, None)
        return self.release([page])

    def _check_held(self, page: int) -> None:
        if not 1 <= page <= self.num_pages or self._holders[page] < 1:
            raise ValueError(f"page {page} is not referenced")
