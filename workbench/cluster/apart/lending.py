"""Own the pages of one memory among several processes, each with an engine. Integers only.

    pages   | 0 null | home of process 0 ......... | home of process 1 ......... | ...
                       free, or referenced here      borrowed: referenced here, lent by process 1

A process allocates from its home alone, so no step waits for another process. A page that goes over to another process
stays its home's property and has two lifetimes: the references of its home (its sequence, its prefix cache, and one for
each loan), and those of the borrower. The borrower gives the loan back when it has no reference left; the page is free
when its home has none left either.

    offered: of the transfer -> claimed: of the borrower -> returned to its home -> free (both let go)

`SharedPagePool` is what one process knows. `PageLedger` is what the coordinator knows, and what is left of a process
that died: the loans that it held go back, and those that it gave stay with their borrowers.
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
    """One process's part of a cache group's pages: its home, and what it borrowed.

    `num_pages`, `num_free` and `num_available` are of its home. Lent pages have a reference for each loan. Borrowed
    pages that only the prefix cache holds are in `idle`: they do not become free here, they go back.
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
            total: pages of all processes, besides the null page.
            page_size: tokens per page.
            home: pages of this process, within 1..total.
            lent: number of loans by page, of a predecessor that died: they come back here.
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
        self._borrowed: dict[int, bool] = {}  # whether its home may read it too, so that it must not be written
        self.idle: OrderedDict[int, None] = OrderedDict()  # borrowed, held by the prefix cache alone
        self._returned: Counter[int] = Counter()  # loans to give back

    @property
    def num_lent(self) -> int:
        """Return the number of home pages that another process, or a transfer, holds."""
        return len(self._lent)

    @property
    def num_borrowed(self) -> int:
        return len(self._borrowed)

    def ref_count(self, page: int) -> int:
        """Return the number of references, in which those of a borrowed page's home count as one."""
        return self._holders[page] + self._borrowed.get(page, False)

    def is_idle(self, page: int) -> bool:
        return page in self.evictable or page in self.idle

    def acquire(self, pages: Iterable[int]) -> None:
        for page in pages:
            super().acquire((page,))
            self.idle.pop(page, None)

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drop one reference from each of `pages`; return those that have no reader left: home pages that became
        free, and borrowed ones, which go back, unless their home reads them too."""
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
        """Add a loan to each of `pages`, which a sequence of this process holds; return for each whether anything but
        that sequence holds it too.

        Raises:
            ValueError: for a borrowed page: its home lends it.
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
        """End one loan of each of `pages`; return those that became free."""
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
        """Take loans of other processes' pages, one reference each. A page that was borrowed already keeps its loan,
        and the new one goes back.

        Args:
            pages: the pages.
            shared: for each, whether it must not be written: its home, or another process, reads it too.
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
        """Return the pages whose loans end, each as often as loans do."""
        returned, self._returned = list(self._returned.elements()), Counter()
        return returned

    def _check_held(self, page: int) -> None:
        if not 1 <= page < len(self._holders) or self._holders[page] < 1:
            raise ValueError(f"page {page} is not referenced")


class HandedPages(NamedTuple):
    """The pages with which another process goes on, in the layout of `Sequence.pages`: those that the next query reads.

    `shared`: for each page, whether it must not be written (see `SharedPagePool.borrow`).
    """

    num_computed_tokens: int
    pages: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[bool, ...], ...] = ()


def shared_pools(manager: KVCacheManager) -> list[SharedPagePool]:
    """Return the pools of a process whose pages others map too; none where they are its own."""
    return [pool for pool in manager.pools if isinstance(pool, SharedPagePool)]


def lend_pages(manager: KVCacheManager, sequence: TokenSequence) -> HandedPages:
    """Lend the pages that the next query of `sequence` reads to another process, which goes on with it. Its own
    references stay until it is freed.

    Raises:
        ValueError: if pages are borrowed themselves, or these are no pages of a shared memory.
    """
    needed, shared = manager.export_pages(sequence), []
    for pool, pages in zip(shared_pools(manager), needed, strict=True):
        found = iter(pool.lend(page for page in pages if page != NULL_PAGE))
        shared.append(tuple(page != NULL_PAGE and next(found) for page in pages))
    return HandedPages(sequence.num_computed_tokens, needed, tuple(shared))


def borrow_pages(manager: KVCacheManager, handed: HandedPages) -> None:
    """Take a reference of each page that another process lends."""
    for pool, pages, shared in zip(shared_pools(manager), handed.pages, handed.shared, strict=True):
        kept = [(page, flag) for page, flag in zip(pages, shared, strict=True) if page != NULL_PAGE]
        pool.borrow([page for page, _ in kept], [flag for _, flag in kept])


class TransferKey(NamedTuple):
    """The name of a transfer: a request and the number of the try. Page numbers are no name, for they come again."""

    request_id: str
    attempt: int


class LentPage(NamedTuple):
    group: int
    page: int


@dataclass
class Offer:
    """Loans of one transfer, which no process holds yet."""

    home: int
    pages: tuple[tuple[int, ...], ...]  # by cache group


@dataclass
class PageLedger:
    """The loans of all pages of a memory, by who holds them: a transfer or a process.

    Args:
        homes: by process, its range of pages in each cache group.
    """

    homes: Sequence[Sequence[range]]
    offers: dict[TransferKey, Offer] = field(default_factory=dict)
    loans: dict[int, Counter[LentPage]] = field(default_factory=dict)  # by borrower

    def home_of(self, group: int, page: int) -> int:
        """Return the process whose home `page` is in."""
        return next(process for process, ranges in enumerate(self.homes) if page in ranges[group])

    def offer(self, key: TransferKey, home: int, pages: Pages) -> None:
        """Record what `home` lends to the transfer `key`; null pages are left out.

        Raises:
            ValueError: for a transfer that exists, and for pages of another home.
        """
        if key in self.offers:
            raise ValueError(f"transfer {key} is under way")
        own = tuple(tuple(page for page in group if page != NULL_PAGE) for group in pages)
        for group, each in enumerate(own):
            if wrong := [page for page in each if page not in self.homes[home][group]]:
                raise ValueError(f"transfer {key}: pages {wrong} of group {group} are not of process {home}")
        self.offers[key] = Offer(home, own)

    def claim(self, key: TransferKey, borrower: int) -> None:
        """Give the loans of a transfer to `borrower`. It is called before the borrower hears of it, so that its death
        before that, and after, are one case."""
        offer = self.offers.pop(key)
        held = self.loans.setdefault(borrower, Counter())
        for group, pages in enumerate(offer.pages):
            held.update(LentPage(group, page) for page in pages)

    def withdraw(self, key: TransferKey) -> dict[int, list[list[int]]]:
        """End a transfer that was not claimed; return the pages that go back, by home and cache group."""
        offer = self.offers.pop(key, None)
        if offer is None:
            return {}
        return {offer.home: [list(pages) for pages in offer.pages]}

    def give_back(self, borrower: int, pages: Pages) -> dict[int, list[list[int]]]:
        """End loans of `borrower`; return them by home and cache group.

        Raises:
            ValueError: for a page that it has not borrowed, as often as named; nothing is changed then.
        """
        held = self.loans.get(borrower, Counter())
        named = Counter(LentPage(group, page) for group, each in enumerate(pages) for page in each)
        if wrong := named - held:
            raise ValueError(f"process {borrower} gives back what it has not borrowed: {sorted(wrong)}")
        held -= named
        self.loans[borrower] = +held
        return self._by_home(named)

    def died(self, process: int) -> dict[int, list[list[int]]]:
        """End the loans that a process held; return them by home and cache group. Those that it gave stay."""
        return self._by_home(self.loans.pop(process, Counter()))

    def lent_by(self, home: int) -> tuple[dict[int, int], ...]:
        """Return all loans of a home by page, for each cache group: its successor is owed them."""
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
        """Return the number of loans by home and borrower; None: of transfers that no process has claimed."""
        found: Counter[tuple[int, int | None]] = Counter()
        for borrower, held in self.loans.items():
            for (group, page), loans in held.items():
                found[self.home_of(group, page), borrower] += loans
        for offer in self.offers.values():
            found[offer.home, None] += sum(map(len, offer.pages))
        return {pair: pages for pair, pages in sorted(found.items(), key=str) if pages}

    def borrowed_by(self, process: int) -> Counter[LentPage]:
        """Return the loans that a process holds."""
        return Counter(self.loans.get(process, Counter()))

    def _by_home(self, pages: Counter[LentPage]) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        for (group, page), loans in pages.items():
            home = self.home_of(group, page)
            found.setdefault(home, [[] for _ in self.homes[home]])[group] += [page] * loans
        return found
