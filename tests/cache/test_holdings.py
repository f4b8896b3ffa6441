"""What happens to a page twice before one step; histories meet these seldom."""

from __future__ import annotations

from workbench.cache.holdings import Holdings
from workbench.cache.pages import PagePool
from workbench.cache.prefix import PrefixIndex
from workbench.cache.tables import Table
from workbench.request import Request, Sequence

TABLES = (Table(lag=5, group=2), Table(back=7))  # of eight tokens the first has settled two: half a page
IDS = tuple(range(20))


def sequence(order: int, ids: tuple[int, ...]) -> Sequence:
    return Sequence.of(Request(f"r{order}", ids), order)


def warm() -> tuple[Holdings, int]:
    """Pages of the first sixteen tokens are idle. The settled page of the first eight is given too."""
    pools = tuple(PagePool(12, 4) for _ in TABLES)
    rooms = tuple(PagePool(8, 4) for _ in TABLES)
    holdings = Holdings(pools, TABLES, 32, PrefixIndex(pools, TABLES, host=rooms), rooms)
    first = sequence(0, IDS)
    begin(holdings, first)
    page = first.pages[0][0]
    first.computed = 16
    holdings.settle(first)
    holdings.release(first)
    holdings.drain()
    return holdings, page


def begin(holdings: Holdings, new: Sequence) -> None:
    holdings.begin(new, holdings.match(new))
    holdings.take(new)


def test_what_is_to_become_a_copy_is_saved_from_its_source() -> None:
    holdings, page = warm()
    second = sequence(1, IDS[:9])
    begin(holdings, second)
    [(table, source, copy)] = holdings.moves.copies
    assert (table, source) == (0, page) and second.pages[0][0] == copy
    assert holdings.set_back(second) == 3
    assert not holdings.moves.copies, "nothing needs to become a copy in a page that is free"
    assert [page for table, page, _ in holdings.moves.saves if table == 0] == [source]


def test_what_has_not_come_yet_is_not_copied_or_saved_but_comes_twice() -> None:
    holdings, page = warm()
    assert holdings.prefix is not None
    for table, pool in enumerate(holdings.pools):
        holdings.prefix.evict(table, len(pool.idle), holdings.moves)
    [place] = [place for table, source, place in holdings.drain().saves if (table, source) == (0, page)]
    second = sequence(1, IDS[:9])
    begin(holdings, second)
    assert not holdings.moves.copies
    own, kept = second.pages[0][0], [target for _, table, _, target in holdings.moves.loads if table == 0]
    assert own in kept and len(set(kept)) == 2
    assert {at for _, table, at, _ in holdings.moves.loads if table == 0} == {place}
    assert holdings.set_back(second) == 0, "its pages hold nothing yet"
    assert own not in [target for _, table, _, target in holdings.moves.loads if table == 0]
    assert not holdings.moves.saves


def test_a_page_that_comes_is_not_saved_when_it_must_go_again() -> None:
    holdings, _ = warm()
    assert holdings.prefix is not None
    for table, pool in enumerate(holdings.pools):
        holdings.prefix.evict(table, len(pool.idle), holdings.moves)
    holdings.drain()
    second = sequence(1, IDS[:9])
    begin(holdings, second)
    holdings.release(second)
    coming = {(table, page) for _, table, _, page in holdings.moves.loads}
    third = sequence(2, tuple(range(20, 73)))
    begin(holdings, third)  # takes every page of the first table, and with them the use of what is in the other
    left = {(table, page) for _, table, _, page in holdings.moves.loads}
    assert len(left) < len(coming) and not holdings.moves.saves
    assert all(holdings.pools[table].kept(page) for table, page in left), "a page comes where another's are"


def test_what_was_to_come_back_stays_on_the_host_when_it_must_wait_again() -> None:
    pools, rooms = (PagePool(8, 4),), (PagePool(8, 4),)
    holdings = Holdings(pools, (Table(),), 32, host=rooms)
    one = sequence(0, IDS[:9])
    begin(holdings, one)
    one.computed = 8
    assert holdings.set_back(one) == 2
    saved = one.saved
    holdings.drain()
    begin(holdings, one)
    assert len(holdings.moves.loads) == 2
    assert holdings.set_back(one) == 2
    assert one.saved == saved and not holdings.moves, "it lies where it lay"
    begin(holdings, one)
    assert [place for _, _, place, _ in holdings.moves.loads] == (saved.places[0] if saved else None)


def test_a_copy_of_a_page_that_another_holds_is_counted_before_it_is_taken() -> None:
    pools = tuple(PagePool(12, 4) for _ in TABLES)
    holdings = Holdings(pools, TABLES, 32, PrefixIndex(pools, TABLES))
    first, second = sequence(0, IDS), sequence(1, IDS[:9])
    begin(holdings, first)
    first.computed = 16
    holdings.settle(first)
    offer, before = holdings.match(second), [pool.available for pool in pools]
    idle = [sum(page in pool.idle for page in pages) for pool, pages in zip(pools, offer.pages, strict=True)]
    wanted = holdings.lacks(second, offer)
    begin(holdings, second)
    assert len(holdings.moves.copies) == 1 and wanted[0] == 1
    gone = [had - pool.available for had, pool in zip(before, pools, strict=True)]
    assert gone == [count + revived for count, revived in zip(wanted, idle, strict=True)]
