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
