"""Two changes to one page before a step, and the page of a text that goes first: random histories meet these seldom."""

from __future__ import annotations

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.kv_cache.prefix import RadixCache
from workbench.request import Request, Sequence

TABLES = (
    KVCacheGroup(residual_length=5, quant_group=2),
    KVCacheGroup(sliding_window=7),
)  # of eight tokens the first has settled two: half a page
IDS = tuple(range(20))


def sequence(order: int, ids: tuple[int, ...]) -> Sequence:
    return Sequence.from_request(Request(f"r{order}", ids), order)


def warm() -> tuple[KVCacheManager, int]:
    """Pages of the first sixteen tokens are idle. The settled page of the first eight is given too."""
    pools = tuple(PagePool(12, 4) for _ in TABLES)
    cpu_pools = tuple(PagePool(8, 4) for _ in TABLES)
    manager = KVCacheManager(pools, TABLES, 32, RadixCache(pools, TABLES, cpu_pools=cpu_pools), cpu_pools)
    first = sequence(0, IDS)
    begin(manager, first)
    page = first.pages[0][0]
    first.num_computed_tokens = 16
    manager.update_after_step(first)
    manager.free(first)
    manager.pop_transfers()
    return manager, page


def begin(manager: KVCacheManager, new: Sequence) -> None:
    manager.start(new, manager.match_prefix(new))
    manager.allocate(new)


def test_what_is_to_become_a_copy_is_saved_from_its_source() -> None:
    manager, page = warm()
    second = sequence(1, IDS[:9])
    begin(manager, second)
    [(table, source, copy)] = manager.transfers.copies
    assert (table, source) == (0, page) and second.pages[0][0] == copy
    assert manager.preempt(second) == 3
    assert not manager.transfers.copies, "nothing needs to become a copy in a page that is free"
    assert [page for table, page, _ in manager.transfers.swap_outs if table == 0] == [source]


def test_what_has_not_come_yet_is_not_copied_or_saved_but_comes_twice() -> None:
    manager, page = warm()
    assert manager.prefix_cache is not None
    for table, pool in enumerate(manager.pools):
        manager.prefix_cache.evict(table, len(pool.evictable), manager.transfers)
    [place] = [place for table, source, place in manager.pop_transfers().swap_outs if (table, source) == (0, page)]
    second = sequence(1, IDS[:9])
    begin(manager, second)
    assert not manager.transfers.copies
    own, kept = second.pages[0][0], [target for _, table, _, target in manager.transfers.swap_ins if table == 0]
    assert own in kept and len(set(kept)) == 2
    assert {at for _, table, at, _ in manager.transfers.swap_ins if table == 0} == {place}
    assert manager.preempt(second) == 0, "its pages hold nothing yet"
    assert own not in [target for _, table, _, target in manager.transfers.swap_ins if table == 0]
    assert not manager.transfers.swap_outs


def test_a_page_that_comes_is_not_saved_when_it_must_go_again() -> None:
    manager, _ = warm()
    assert manager.prefix_cache is not None
    for table, pool in enumerate(manager.pools):
        manager.prefix_cache.evict(table, len(pool.evictable), manager.transfers)
    manager.pop_transfers()
    second = sequence(1, IDS[:9])
    begin(manager, second)
    manager.free(second)
    coming = {(table, page) for _, table, _, page in manager.transfers.swap_ins}
    third = sequence(2, tuple(range(20, 73)))
    begin(manager, third)  # takes every page of the first table, and with them the use of what is in the other
    left = {(table, page) for _, table, _, page in manager.transfers.swap_ins}
    assert len(left) < len(coming) and not manager.transfers.swap_outs
    assert all(manager.pools[table].is_cached(page) for table, page in left), "a page comes where another's are"


def test_what_was_to_come_back_stays_on_the_host_when_it_must_wait_again() -> None:
    pools, cpu_pools = (PagePool(8, 4),), (PagePool(8, 4),)
    manager = KVCacheManager(pools, (KVCacheGroup(),), 32, cpu_pools=cpu_pools)
    one = sequence(0, IDS[:9])
    begin(manager, one)
    one.num_computed_tokens = 8
    assert manager.preempt(one) == 2
    saved = one.swapped
    manager.pop_transfers()
    begin(manager, one)
    assert len(manager.transfers.swap_ins) == 2
    assert manager.preempt(one) == 2
    assert one.swapped == saved and not manager.transfers, "it lies where it lay"
    begin(manager, one)
    assert [place for _, _, place, _ in manager.transfers.swap_ins] == (saved.cpu_pages[0] if saved else None)


def test_a_copy_of_a_page_that_another_holds_is_counted_before_it_is_taken() -> None:
    pools = tuple(PagePool(12, 4) for _ in TABLES)
    manager = KVCacheManager(pools, TABLES, 32, RadixCache(pools, TABLES))
    first, second = sequence(0, IDS), sequence(1, IDS[:9])
    begin(manager, first)
    first.num_computed_tokens = 16
    manager.update_after_step(first)
    offer, before = manager.match_prefix(second), [pool.num_available for pool in pools]
    idle = [sum(page in pool.evictable for page in pages) for pool, pages in zip(pools, offer.pages, strict=True)]
    wanted = manager.pages_to_start(second, offer)
    begin(manager, second)
    assert len(manager.transfers.copies) == 1 and wanted[0] == 1
    gone = [had - pool.num_available for had, pool in zip(before, pools, strict=True)]
    assert gone == [count + revived for count, revived in zip(wanted, idle, strict=True)]


def test_a_text_that_ended_loses_its_last_page_first() -> None:
    """Without a page of its front, nothing behind that page could be offered."""
    pools, tables = (PagePool(6, 4),), (KVCacheGroup(),)
    index = RadixCache(pools, tables)
    manager = KVCacheManager(pools, tables, 32, index)
    first = sequence(0, IDS[:17])
    begin(manager, first)
    first.num_computed_tokens = 17
    manager.update_after_step(first)
    manager.free(first)
    for pages in (4, 3, 2, 1):
        assert manager.match_prefix(sequence(1, IDS)).num_tokens == 4 * pages
        index.evict(0, 1)
