"""Who owns which page of the cache. Integers only: the tensors know nothing of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from workbench.errors import WorkbenchError

NULL_PAGE = 0  # never owned: padding rows write there and unused table entries point there


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class PagePool:
    """The pages of one table, counted by their holders.

        page     0 (null) | 1 .............................. pages |
        holders  -        | 0 = free, n = shared by n              |
        kept     -        | one of the holders is the prefix index |   idle = kept, and it is the only holder

    free + used + idle = pages, always. A page with several holders must not be written. Idle pages stand in the
    order in which they became so: the least recently used first.
    """

    def __init__(self, pages: int, page_size: int, order: Sequence[int] | None = None):
        """`order` gives the order in which free pages are first handed out; any permutation of 1..pages."""
        if pages < 1 or page_size < 1:
            raise WorkbenchError(f"a page pool needs pages and tokens a page, not {pages} and {page_size}")
        if order is not None and sorted(order) != list(range(1, pages + 1)):
            raise ValueError(f"order must be a permutation of 1..{pages}")
        self.pages = pages
        self.page_size = page_size
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._free = list(reversed(order)) if order is not None else list(range(pages, 0, -1))
        self._holders = [0] * (pages + 1)
        self._kept = bytearray(pages + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that a sequence can have: free ones, and idle ones once the index has given them up."""
        return len(self._free) + len(self.idle)

    @property
    def used(self) -> int:
        """Pages that some sequence holds."""
        return self.pages - self.available

    def holders(self, page: int) -> int:
        return self._holders[page]

    def kept(self, page: int) -> bool:
        return bool(self._kept[page])

    def counts(self) -> tuple[list[int], bytes]:
        """Of every page, with 0 for the null page: its holders, and whether the index is one. Copies."""
        return self._holders.copy(), bytes(self._kept)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one holder each; asking for more than are free is the caller's mistake."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`, which must be held already."""
        for page in pages:
            self._check_held(page)
            self._holders[page] += 1
            self.idle.pop(page, None)

    def release(self, pages: Iterable[int]) -> list[int]:
        """One holder fewer for each of `pages`; those that nobody holds any more are free, and returned."""
        freed = []
        for page in pages:
            self._check_held(page)
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
                freed.append(page)
            elif self._holders[page] == 1 and self._kept[page]:
                self.idle[page] = None
        return freed

    def keep(self, page: int) -> None:
        """The prefix index becomes a holder of `page`, which a sequence holds."""
        if self._kept[page]:
            raise ValueError(f"page {page} is kept already")
        self.share([page])
        self._kept[page] = 1

    def give_up(self, page: int) -> list[int]:
        """The prefix index holds `page` no longer; returns it where that made it free."""
        if not self._kept[page]:
            raise ValueError(f"page {page} is not kept")
        self._kept[page] = 0
        self.idle.pop(page, None)
        return self.release([page])

    def _check_held(self, page: int) -> None:
        if not 1 <= page <= self.pages or self._holders[page] < 1:
            raise ValueError(f"page {page} is not held")
