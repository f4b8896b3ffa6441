"""Divide the pages of one memory among several processes, each with an engine. Integers only.

    pages   | 0 null | home of process 0 ......... | home of process 1 ......... | ...
                       free, or referenced here      borrowed: referenced here, lent by process 1

A process allocates from its home alone, so no step waits for another process. A page that is lent to another process
stays its home's property and has two lifetimes: the references of its home (its sequence, its prefix cache, and one for
each loan), and those of the borrower. The borrower gives the loan back when it has no reference left; the page is free
when its home has none left either.

    offered: of the transfer -> claimed: of the borrower -> returned to its home -> free (both let go)

`SharedPagePool` is the view of one process. `PageLedger` is the view of the coordinator, and outlives a process that
died: loans held by that process go back, and loans given by it stay with their borrowers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import NULL_PAGE, PagePool
from workbench.request import Sequence as TokenSequence

Pages = Sequence[Sequence[int]]  # by cache group


class SharedPagePool(PagePool):
    """One process's part of a cache group's pages: its home pages, and the pages that it borrowed.

    `num_pages`, `num_free` and `num_available` count home pages. Lent pages have a reference for each loan. Borrowed
    pages that only the prefix cache holds are in `idle`: they do not become free here, but are given back.
    """

    def __init__(
        self,
        total: int,
        page_size: int,
        home: range,
        lent: Mapping[int, int] | None = None,
    ):
        """Create the pool of a process.

        Args:
            total: number of pages of all processes, without the null page.
            page_size: tokens per page.
            home: pages of this process, within 1..total.
            lent: number of loans by page, given by a predecessor that died; they are returned here.
        """
        if not len(home) or home.start < 1 or home.stop > total + 1 or home.step != 1:
            raise ValueError(f"home {home} is not within pages 1..{total}")
        super().__init__(len(home), page_size)
        self.home = home
        self._lent = Counter(lent or {})
        if not all(page in home for page in self._lent):
            raise ValueError(f"pages {sorted(set(self._lent) - set(home))} were not lent by {home}")
        self._free = [home.start - 1 + page for page in self._free if home.start - 1 + page not in self._lent]
        self._holders, self._kept = [0] * (total + 1), bytearray(total + 1)
        for page, loans in self._lent.items():
            self._holders[page] = loans
        self._borrowed: dict[int, bool] = {}  # page -> whether its home may read it too: then it is read-only
        self.idle: OrderedDict[int, None] = OrderedDict()  # borrowed pages that only the prefix cache holds
        self._returned: Counter[int] = Counter()  # loans to give back

    @property
    def num_lent(self) -> int:
        """Return the number of home pages that another process, or a transfer, holds."""
        return len(self._lent)

    @property
    def num_borrowed(self) -> int:
        return len(self._borrowed)

    def ref_count(self, page: int) -> int:
        """Return the number of references to `page`, loans included; for a borrowed page, all references of its owner
        count as one.
        """
        return self._holders[page] + self._borrowed.get(page, False)

    def is_idle(self, page: int) -> bool:
        return page in self.evictable or page in self.idle

    def acquire(self, pages: Iterable[int]) -> None:
        for page in pages:
            super().acquire((page,))
            self.idle.pop(page, None)

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drop one reference from each of `pages`. A home page without references becomes free; a borrowed page is
        given back to its owner. Return the pages that became free or were given back, except pages that their owner
        still reads.
        """
        freed = []
        for page in pages:
            if page in self.home:
                freed += super().release((page,))
                continue
            self._check_held(page)
            self._holders[page] -= 1
            if self._holders[page] == 0:
                freed += [page] * (not self._borrowed.pop(page))
                self._returned[page] += 1
            elif self._holders[page] == 1 and self._kept[page]:
                self.idle[page] = None
        return freed

    def unmark_cached(self, page: int) -> list[int]:
        self.idle.pop(page, None)
        return super().unmark_cached(page)

    def lend(self, pages: Iterable[int]) -> list[bool]:
        """Add a loan to each of `pages`, which a sequence of this process holds; return for each page whether it has
        holders besides that sequence.

        Raises:
            ValueError: for a borrowed page: only its home may lend it.
        """
        shared = []
        for page in pages:
            if page not in self.home:
                raise ValueError(f"page {page} is not a page of {self.home}: only its home lends it")
            shared.append(self._holders[page] > 1)
            self.acquire((page,))
            self._lent[page] += 1
        return shared

    def take_back(self, pages: Iterable[int]) -> list[int]:
        """End one loan of each of `pages`; return the pages that became free."""
        freed = []
        for page in pages:
            if not self._lent[page]:
                raise ValueError(f"page {page} is not lent")
            self._lent[page] -= 1
            if not self._lent[page]:
                del self._lent[page]
            freed += self.release((page,))
        return freed

    def borrow(self, pages: Iterable[int], shared: Iterable[bool]) -> None:
        """Borrow pages of other processes, one reference each. A page already borrowed keeps its loan, and the new
        loan is given back.

        Args:
            pages: the pages.
            shared: for each page, whether it is read-only because its home or another process reads it too.
        """
        for page, of_others in zip(pages, shared, strict=True):
            if not 1 <= page < len(self._holders) or page in self.home:
                raise ValueError(f"page {page} cannot be borrowed: {self.home} is home")
            if page in self._borrowed:
                self.acquire((page,))
                self._borrowed[page] |= of_others
                self._returned[page] += 1
            else:
                self._holders[page], self._borrowed[page] = 1, of_others

    def pop_returned(self) -> list[int]:
        """Return the pages to give back; a page occurs once for each loan that ends."""
        returned, self._returned = list(self._returned.elements()), Counter()
        return returned

    def _check_held(self, page: int) -> None:
        if not 1 <= page < len(self._holders) or self._holders[page] < 1:
            raise ValueError(f"page {page} is not referenced")


class HandedPages(NamedTuple):
    """The pages on which another process continues a sequence: all pages that its next query reads, in the layout of
    `Sequence.pages`.

    `shared`: for each page, whether it is read-only (see `SharedPagePool.borrow`).
    """

    num_computed_tokens: int
    pages: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[bool, ...], ...] = ()


def shared_pools(manager: KVCacheManager) -> list[SharedPagePool]:
    """Return a manager's pools of shared pages; an empty list if no other process maps its pages."""
    return [pool for pool in manager.pools if isinstance(pool, SharedPagePool)]


def lend_pages(manager: KVCacheManager, sequence: TokenSequence) -> HandedPages:
    """Lend the pages that the next query of `sequence` reads to another process, which continues it. The references
    of `sequence` stay until it is freed.

    Raises:
        ValueError: if a page is itself borrowed, or the pages are not in shared memory.
    """
    needed, shared = manager.export_pages(sequence), []
    for pool, pages in zip(shared_pools(manager), needed, strict=True):
        found = iter(pool.lend(page for page in pages if page != NULL_PAGE))
        shared.append(tuple(page != NULL_PAGE and next(found) for page in pages))
    return HandedPages(sequence.num_computed_tokens, needed, tuple(shared))


def borrow_pages(manager: KVCacheManager, handed: HandedPages) -> None:
    """Take a reference to each page that another process lends."""
    for pool, pages, shared in zip(shared_pools(manager), handed.pages, handed.shared, strict=True):
        kept = [(page, flag) for page, flag in zip(pages, shared, strict=True) if page != NULL_PAGE]
        pool.borrow([page for page, _ in kept], [flag for _, flag in kept])


class TransferKey(NamedTuple):
    """Key of a transfer: request and number of the attempt. Page numbers are no key, because pages are reused."""

    request_id: str
    attempt: int


class LentPage(NamedTuple):
    group: int
    page: int


@dataclass
class Offer:
    """The loans of one transfer that no process has claimed yet."""

    home: int
    pages: tuple[tuple[int, ...], ...]  # by cache group


@dataclass
class PageLedger:
    """The loans of all pages of a memory, by holder: a transfer or a process.

    Args:
        homes: for each process, its range of pages in each cache group.
    """

    homes: Sequence[Sequence[range]]
    offers: dict[TransferKey, Offer] = field(default_factory=dict)
    loans: dict[int, Counter[LentPage]] = field(default_factory=dict)  # by borrower

    def home_of(self, group: int, page: int) -> int:
        """Return the process that owns `page`."""
        return next(process for process, ranges in enumerate(self.homes) if page in ranges[group])

    def offer(self, key: TransferKey, home: int, pages: Pages) -> None:
        """Record the pages that `home` lends to the transfer `key`; null pages are left out.

        Raises:
            ValueError: if the transfer exists already, or a page has another home.
        """
        if key in self.offers:
            raise ValueError(f"transfer {key} is under way")
        own = tuple(tuple(page for page in group if page != NULL_PAGE) for group in pages)
        for group, each in enumerate(own):
            if wrong := [page for page in each if page not in self.homes[home][group]]:
                raise ValueError(f"transfer {key}: pages {wrong} of group {group} are not of process {home}")
        self.offers[key] = Offer(home, own)

    def claim(self, key: TransferKey, borrower: int) -> None:
        """Give the loans of a transfer to `borrower`. Call it before `borrower` is notified: its death is then handled
        in the same way before and after the notice.
        """
        offer = self.offers.pop(key)
        held = self.loans.setdefault(borrower, Counter())
        for group, pages in enumerate(offer.pages):
            held.update(LentPage(group, page) for page in pages)

    def withdraw(self, key: TransferKey) -> dict[int, list[list[int]]]:
        """End an unclaimed transfer; return the pages to give back, by home and cache group."""
        offer = self.offers.pop(key, None)
        if offer is None:
            return {}
        return {offer.home: [list(pages) for pages in offer.pages]}

    def give_back(self, borrower: int, pages: Pages) -> dict[int, list[list[int]]]:
        """End loans of `borrower`; return their pages by home and cache group.

        Raises:
            ValueError: for a page listed more often than it is borrowed; the ledger is then unchanged.
        """
        held = self.loans.get(borrower, Counter())
        named = Counter(LentPage(group, page) for group, each in enumerate(pages) for page in each)
        if wrong := named - held:
            raise ValueError(f"process {borrower} gives back pages that it has not borrowed: {sorted(wrong)}")
        held -= named
        self.loans[borrower] = +held
        return self._by_home(named)

    def died(self, process: int) -> dict[int, list[list[int]]]:
        """End the loans that `process` held; return their pages by home and cache group. Loans that it gave stay."""
        return self._by_home(self.loans.pop(process, Counter()))

    def lent_by(self, home: int) -> tuple[dict[int, int], ...]:
        """Return the number of loans of each page that the process `home` has given, by page for each cache group. They
        are owed to `home`, or to the process that replaces it.
        """
        ranges = self.homes[home]
        owed: tuple[Counter[int], ...] = tuple(Counter() for _ in ranges)
        for held in self.loans.values():
            for (group, page), loans in held.items():
                if page in ranges[group]:
                    owed[group][page] += loans
        for offer in self.offers.values():
            if offer.home == home:
                for group, pages in enumerate(offer.pages):
                    owed[group].update(pages)
        return tuple(dict(each) for each in owed)

    def lent_pages(self) -> dict[tuple[int, int | None], int]:
        """Return the number of loans by (home, borrower); borrower None counts unclaimed transfers."""
        found: Counter[tuple[int, int | None]] = Counter()
        for borrower, held in self.loans.items():
            for (group, page), loans in held.items():
                found[self.home_of(group, page), borrower] += loans
        for offer in self.offers.values():
            found[offer.home, None] += sum(map(len, offer.pages))
        return {pair: pages for pair, pages in sorted(found.items(), key=str) if pages}

    def borrowed_by(self, process: int) -> Counter[LentPage]:
        """Return the number of loans that a process holds, by (cache group, page)."""
        return Counter(self.loans.get(process, Counter()))

    def _by_home(self, pages: Counter[LentPage]) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        for (group, page), loans in pages.items():
            home = self.home_of(group, page)
            found.setdefault(home, [[] for _ in self.homes[home]])[group] += [page] * loans
        return found
