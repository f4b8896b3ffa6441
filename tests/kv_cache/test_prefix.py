"""The prefix index under random histories, against a list of what was entered and not given up."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.thorough import tries
from workbench.kv_cache.pages import NULL_PAGE, KVCacheGroup, PagePool, PageTransfers
from workbench.kv_cache.prefix import RadixCache
from workbench.kv_cache.radix_tree import RadixNode

SIZE, PAGES, TTL = 2, 14, 10.0
LAYOUTS = [
    (KVCacheGroup(),),
    (KVCacheGroup(), KVCacheGroup(sliding_window=3)),
    (KVCacheGroup(sliding_window=5, num_sink_tokens=1),),
    (KVCacheGroup(residual_length=3, quant_group=2), KVCacheGroup(sliding_window=5)),
]


Prefix = tuple[str, tuple[int, ...]]  # a salt, and all tokens up to the end of a page


class Same(int):
    """A token with the same hash as all others."""

    def __hash__(self) -> int:
        return 7


class Holder:
    """A sequence: tokens, and its pages of each table."""

    def __init__(self, key: int, salt: str, ids: list[int], pages: tuple[list[int], ...], computed: int):
        self.key, self.salt, self.ids, self.pages, self.computed = key, salt, ids, pages, computed
        self.over = False  # the index was cleared under it
        self.known = computed // SIZE  # pages of tokens that the index has heard of

    def prefix(self, place: int) -> Prefix:
        return self.salt, tuple(self.ids[: (place + 1) * SIZE])


class Index(RuleBasedStateMachine):
    """Sequences begin on what is offered, grow, enter their pages, leave or break; pools run short, time passes."""

    @initialize(
        tables=st.sampled_from(LAYOUTS), ttl=st.sampled_from([None, TTL]), pinned=st.sampled_from([1, PAGES // 2]),
        seed=st.integers(0, 10**6),
    )  # fmt: skip
    def begin(self, tables: tuple[KVCacheGroup, ...], ttl: float | None, pinned: int, seed: int) -> None:
        self.tables, self.ttl, self.now, self.draw = tables, ttl, 0.0, random.Random(seed)
        self.pools = tuple(PagePool(PAGES, SIZE) for _ in tables)
        self.most_pinned = pinned
        self.index = RadixCache(self.pools, tables, ttl, lambda: self.now, pinned_share=pinned / PAGES)
        self.holders: list[Holder] = []
        # By table, salt and all tokens up to the end of a page: the page, who entered it, and when it was last used.
        self.known: list[dict[Prefix, tuple[int, int]]] = [{} for _ in tables]
        self.used: dict[Prefix, float] = {}
        self.idle: list[list[int]] = [[] for _ in tables]  # in the order in which they became so
        # By salt and all tokens up to the end of a page: the end of its pin, and the seconds that a use renews it for.
        self.pinned: dict[Prefix, tuple[float, float]] = {}
        self.count = 0

    def tokens(self, count: int) -> list[int]:
        return [Same(self.draw.randrange(2)) for _ in range(count)]

    @rule(length=st.integers(1, 12), salt=st.sampled_from(["", "", "b"]))
    def start(self, length: int, salt: str) -> None:
        self.come(self.count, salt, self.tokens(length))
        self.count += 1

    def come(self, key: int, salt: str, ids: list[int]) -> None:
        offer = self.index.match_prefix(ids, salt)
        self.forget_given_up()
        wanted, pages = self.expected(ids, salt)
        assert (offer.num_tokens, offer.pages) == (wanted, pages)
        assert offer.num_tokens < len(ids), "the last token is always computed"
        self.index.acquire(key, offer)
        for end in range(SIZE, offer.num_tokens + 1, SIZE):
            self.used[salt, tuple(ids[:end])] = self.now
            if (until := self.pinned.get((salt, tuple(ids[:end])))) and self.now < until[0]:
                self.pinned[salt, tuple(ids[:end])] = self.now + until[1], until[1]
        self.forget_given_up()
        held = tuple(list(pages) for pages in offer.pages)
        self.holders.append(Holder(key, salt, ids, held, offer.num_tokens))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def come_again(self, data: st.DataObject) -> None:
        """Preempted, and started again on the cached prefix: the pages it entered before are still its own."""
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.leave(holder)
        self.come(holder.key, holder.salt, holder.ids)

    def expected(self, ids: list[int], salt: str) -> tuple[int, tuple[list[int], ...]]:
        """The longest prefix whose every needed page is known, and used within its time at every page before."""
        best: tuple[int, tuple[list[int], ...]] = (0, tuple([] for _ in self.tables))
        for tokens in range(SIZE, len(ids), SIZE):
            place = salt, tuple(ids[:tokens])
            if self.ttl is not None and self.now - self.used.get(place, -99.0) > self.ttl and not self.is_pinned(place):
                break
            found = []
            for known, table in zip(self.known, self.tables, strict=True):
                first, rest = table.pages_needed(tokens, tokens, SIZE)
                mine = [NULL_PAGE] * max(first.stop, rest.stop)
                for at in (*first, *rest):
                    mine[at] = known.get((salt, tuple(ids[: (at + 1) * SIZE])), (-1, -1))[0]
                found.append(mine)
            if not any(-1 in mine for mine in found):
                best = tokens, tuple(found)
        return best

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow(self, data: st.DataObject, count: int) -> None:
        """Compute `count` tokens: pages for them, then full ones are entered, and dead ones given back."""
        holder = data.draw(st.sampled_from(self.holders))
        holder.ids += self.tokens(max(0, holder.computed + count - len(holder.ids)))
        end = holder.computed + count
        needs = [
            max(0, -(-table.quantized_until(end) // SIZE) - len(pages))
            for table, pages in zip(self.tables, holder.pages, strict=True)
        ]
        if any(need + 1 > pool.num_available for need, pool in zip(needs, self.pools, strict=True)):
            return
        for t, (table, pages, pool) in enumerate(zip(self.tables, holder.pages, self.pools, strict=True)):
            place = table.quantized_until(holder.computed) // SIZE
            copied = place < len(pages) and pool.ref_count(pages[place]) > 1
            fresh = self.allocate(t, needs[t] + copied)
            if copied:
                self.release(t, [pages[place]])
                pages[place] = fresh.pop(0)
            pages += fresh
        holder.computed = end
        adopted = self.index.insert(holder.key, holder.ids, holder.salt, end, holder.pages)
        if holder.over:
            assert not adopted
        else:
            self.note_entered(holder, {(t, place) for t, place, _ in adopted})
        for t, place, page in adopted:
            assert self.known[t][holder.prefix(place)][0] == page
            if page in self.idle[t]:
                self.idle[t].remove(page)
            self.release(t, [holder.pages[t][place]])
            holder.pages[t][place] = page
        for t, table in enumerate(self.tables):
            for place in table.out_of_window_pages(end, SIZE):
                if holder.pages[t][place] != NULL_PAGE:
                    self.release(t, [holder.pages[t][place]])
                    holder.pages[t][place] = NULL_PAGE

    def note_entered(self, holder: Holder, adopted: set[tuple[int, int]]) -> None:
        for place in range(holder.known, holder.computed // SIZE):
            self.used[holder.prefix(place)] = self.now
        holder.known = holder.computed // SIZE
        for t, table in enumerate(self.tables):
            for place in range(table.quantized_until(holder.computed) // SIZE):
                key, page = holder.prefix(place), holder.pages[t][place]
                entered = page != NULL_PAGE and (t, place) not in adopted and key not in self.known[t]
                if entered and self.pools[t].is_cached(page):
                    self.known[t][key] = page, holder.key

    def is_pinned(self, key: Prefix) -> bool:
        return self.now < self.pinned.get(key, (-1.0, 0.0))[0]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), seconds=st.sampled_from([2.0, 5.0, 20.0]), count=st.sampled_from([1, 4, 14]))
    def pin(self, data: st.DataObject, seconds: float, count: int) -> None:
        """A caller pays for the beginning of a text; a share of the pages may be pinned."""
        holder = data.draw(st.sampled_from(self.holders))
        tokens = self.index.pin(holder.ids[:count], holder.salt, seconds)
        assert tokens % SIZE == 0 and tokens <= count
        for end in range(SIZE, tokens + 1, SIZE):
            key = holder.salt, tuple(holder.ids[:end])
            until, life = self.pinned.get(key, (0.0, 0.0)) if self.is_pinned(key) else (0.0, 0.0)
            self.pinned[key] = max(until, self.now + seconds), max(life, seconds)
            assert (node := self.node(key)) is not None and node.pinned_until == self.pinned[key][0]
        assert self.index.pins.num_pinned == sum(map(self.is_pinned, self.pinned)) <= self.most_pinned

    def node(self, key: Prefix) -> RadixNode | None:
        node, ids = self.index.tree.roots.get(key[0]), key[1]
        for end in range(SIZE, len(ids) + 1, SIZE):
            node = None if node is None else node.children.get(ids[end - SIZE : end])
        return node

    def eviction_order(self, table: int) -> list[int]:
        """Idle pages by use, and behind them the pinned ones by the end of their pins."""
        keys = {page: key for key, (page, _) in self.known[table].items()}
        ends = {page: self.pinned[keys[page]][0] for page in self.idle[table] if self.is_pinned(keys[page])}
        return sorted(self.idle[table], key=lambda page: ends.get(page, 0.0))

    def allocate(self, table: int, count: int) -> list[int]:
        pool = self.pools[table]
        short = count - pool.num_free
        if short > 0:
            oldest = self.eviction_order(table)[:short]
            self.index.evict(table, short)
            assert not any(pool.is_cached(page) for page in oldest), "not the least recently used was given up"
            assert pool.num_free == count or self.tables[table].sliding_window is None
            self.forget_given_up()
        return pool.allocate(count)

    @precondition(lambda self: any(self.idle))
    @rule(data=st.data(), count=st.integers(1, 3))
    def run_short(self, data: st.DataObject, count: int) -> None:
        """Another request needs pages of one group."""
        table = data.draw(st.sampled_from([t for t, idle in enumerate(self.idle) if idle]))
        order = self.eviction_order(table)
        oldest, younger = order[:count], order[count:]
        self.index.evict(table, count)
        assert not any(self.pools[table].is_cached(page) for page in oldest), "not the least recently used was given up"
        if self.tables[table].sliding_window is not None:  # pages of a window lead to no others
            assert all(self.pools[table].is_cached(page) for page in younger), "more was given up than was wanted"
        self.forget_given_up()

    def release(self, table: int, pages: list[int]) -> None:
        self.pools[table].release(pages)
        self.idle[table] += [page for page in pages if page in self.pools[table].evictable]

    def forget_given_up(self) -> None:
        for t, known in enumerate(self.known):
            for key in [key for key, (page, _) in known.items() if not self.pools[t].is_cached(page)]:
                del known[key]
            self.idle[t] = [page for page in self.idle[t] if page in self.pools[t].evictable]
        self.pinned = {key: pin for key, pin in self.pinned.items() if self.node(key)}

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), broken=st.sampled_from([False, False, True]))
    def end(self, data: st.DataObject, broken: bool) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        if broken:
            all_known = [(t, key, *found) for t, known in enumerate(self.known) for key, found in known.items()]
            mine = [(t, key, page) for t, key, page, by in all_known if by == holder.key]
            self.index.finish(holder.key, failed=True)
            for t, key, page in mine:
                assert not self.pools[t].is_cached(page), "what broke is still offered"
                del self.known[t][key]
        else:
            self.index.finish(holder.key)
        self.leave(holder)

    def leave(self, holder: Holder) -> None:
        self.index.release(holder.key)
        for place in range(0 if holder.over else holder.computed // SIZE):
            self.used[holder.prefix(place)] = self.now
        for t, pages in enumerate(holder.pages):
            self.release(t, [page for page in reversed(pages) if page != NULL_PAGE])
        self.forget_given_up()

    @rule(seconds=st.sampled_from([1.0, 9.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.index.num_pages > 6)
    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.forget_given_up()
        assert self.index.num_pages == 0 and not any(self.known) and not self.index.tree.roots
        for holder in self.holders:
            holder.over = True

    @invariant()
    def holders_are_counted(self) -> None:
        if not hasattr(self, "index"):
            return
        assert self.index.num_pages == sum(len(known) for known in self.known)
        for t, pool in enumerate(self.pools):
            held = [page for holder in self.holders for page in holder.pages[t] if page != NULL_PAGE]
            kept = [page for page, _ in self.known[t].values()]
            assert len(kept) == len(set(kept))
            for page in range(1, PAGES + 1):
                assert pool.ref_count(page) == held.count(page) + kept.count(page)
            assert list(pool.evictable) == self.idle[t] and set(pool.evictable) == set(kept) - set(held)
        for key in self.pinned:
            assert (node := self.node(key)) is not None and self.index.pins.is_pinned(node) == self.is_pinned(key)

    def teardown(self) -> None:
        """After every request has ended and the index is cleared, no page and no node is left."""
        if not hasattr(self, "index"):
            return
        for holder in self.holders:
            self.index.finish(holder.key)
            self.index.release(holder.key)
            for t, pages in enumerate(holder.pages):
                self.pools[t].release(page for page in reversed(pages) if page != NULL_PAGE)
        for t, pool in enumerate(self.pools):
            self.index.evict(t, PAGES)
            assert pool.num_free == PAGES
        assert not self.index.tree.roots and not self.index._paths and not self.index._entered


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=tries(150), stateful_step_count=40)


@pytest.mark.parametrize("ids", [[1], [1, 2]])
def test_the_last_token_is_never_offered(ids: list[int]) -> None:
    pool = PagePool(4, SIZE)
    index = RadixCache([pool], [KVCacheGroup()])
    index.insert(0, ids, "", len(ids), (pool.allocate(1),))
    assert (
        index.match_prefix(ids).num_tokens == 0 and index.match_prefix([*ids, 1]).num_tokens == len(ids) // SIZE * SIZE
    )


def cached_text(index: RadixCache, pool: PagePool, key: int, ids: list[int], salt: str = "") -> list[int]:
    """Compute a text of whole pages, and leave its pages to the index."""
    pages = pool.allocate(len(ids) // SIZE)
    index.insert(key, ids, salt, len(ids), (pages,))
    index.finish(key)
    index.release(key)
    pool.release(reversed(pages))
    return pages


@given(known=st.integers(0, 3), own=st.integers(1, 3), evicted=st.integers(0, 6))
def test_what_a_failed_request_entered_is_offered_no_more(known: int, own: int, evicted: int) -> None:
    """After it was preempted, wherever its pages are by then; what it began on stays."""
    pool, cpu, ids = PagePool(6, SIZE), PagePool(6, SIZE), list(range(SIZE * (known + own)))
    index = RadixCache([pool], [KVCacheGroup()], None, lambda: 0.0, (cpu,))
    cached_text(index, pool, 0, ids[: SIZE * known])
    index.acquire(1, match := index.match_prefix(ids))
    pages = [*match.pages[0], *pool.allocate(own)]
    index.insert(1, ids, "", len(ids), (pages,))
    index.release(1)
    pool.release(reversed(pages))
    index.evict(0, min(evicted, known + own), PageTransfers())
    index.finish(1, failed=True)
    assert index.match_prefix([*ids, 0]).num_tokens == SIZE * known
    assert index.num_pages + cpu.num_used == known


@settings(max_examples=tries(600))
@given(st.lists(st.tuples(st.sampled_from(["pin", "use", "wait"]), st.sampled_from([1.0, 3.0, 10.0])), max_size=14))
def test_a_pin_lasts_its_seconds_after_each_use_and_one_that_ended_is_forgotten(steps: list[tuple[str, float]]) -> None:
    now, pool = 0.0, PagePool(2, SIZE)
    index = RadixCache([pool], [KVCacheGroup()], None, lambda: now, pinned_share=1.0)
    pages = cached_text(index, pool, 0, [1, 1])
    (node,) = index.tree.match_prefix([1, 1, 0], "")
    until = life = 0.0
    for kind, seconds in steps:
        if kind == "wait":
            now += seconds
        elif kind == "pin":
            life = max(life if now < until else 0.0, seconds)
            until = max(until, now + seconds)
            assert index.pin([1, 1], "", seconds) == SIZE
        else:
            until = now + life if now < until else until
            index.acquire(1, index.match_prefix([1, 1, 0]))
            index.release(1)
            pool.release(pages)
        assert index.pins.is_pinned(node) == (now < until) == bool(index.pins.num_pinned)


def test_a_hit_renews_a_pin_and_time_ends_it() -> None:
    now, pool = 0.0, PagePool(6, SIZE)
    index = RadixCache([pool], [KVCacheGroup()], None, lambda: now)
    kept = cached_text(index, pool, 0, [1, 1])
    other = cached_text(index, pool, 1, [2, 2])
    assert index.pin([1, 1], "", 10.0) == SIZE and index.pin([3, 3], "", 10.0) == 0
    now = 9.0
    index.acquire(2, index.match_prefix([1, 1, 0]))
    index.release(2)
    pool.release(kept)
    index.acquire(3, index.match_prefix([2, 2, 0]))  # used later than the pinned one
    index.release(3)
    pool.release(other)
    now = 18.0  # after 10 and before 19
    index.evict(0, 1)
    assert pool.is_cached(kept[0]) and not pool.is_cached(other[0])
    newer = cached_text(index, pool, 4, [4, 4])
    now = 19.0
    index.evict(0, 1)
    assert pool.is_cached(newer[0]) and not pool.is_cached(kept[0])


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([2.0, 5.0, 20.0])), min_size=1, max_size=5))
def test_a_page_is_pinned_until_the_last_of_its_pins_ends(pins: list[tuple[int, float]]) -> None:
    now, pool, ids = 0.0, PagePool(6, SIZE), list(range(3 * SIZE))
    index = RadixCache([pool], [KVCacheGroup()], None, lambda: now, pinned_share=1.0)
    cached_text(index, pool, 0, ids)
    for pages, seconds in pins:
        assert index.pin(ids[: SIZE * pages], "", seconds) == SIZE * pages
    for now in (1.0, 2.0, 5.0, 20.0):
        assert index.pins.num_pinned == max((pages for pages, seconds in pins if now < seconds), default=0)


def test_a_pin_is_no_reference_and_has_a_bound() -> None:
    pool = PagePool(6, SIZE)
    index = RadixCache([pool], [KVCacheGroup()], None, lambda: 0.0, pinned_share=0.5)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    cached_text(index, pool, 0, ids)
    assert index.pin(ids, "", 60.0) == 3 * SIZE, "half of six pages"
    assert index.pin(ids[:4], "", 60.0) == 2 * SIZE, "what is pinned already takes no room"
    index.evict(0, 5)
    assert pool.num_free == 6 and index.pins.num_pinned == 0
    cached_text(index, pool, 1, ids)
    assert index.pin(ids, "", 60.0) == 3 * SIZE, "nodes that are gone take no room"


@example([("a", 0, 4), ("a", 1, 4)], 0.5)  # the second path reaches the share in its middle
@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 5), st.integers(0, 4)), max_size=12),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_a_tenant_pins_its_share_at_most_and_takes_no_other_tenants(steps: list, share: float) -> None:
    pool = PagePool(60, SIZE)
    index = RadixCache([pool], [KVCacheGroup()], None, lambda: 0.0, pinned_share=0.2, tenant_pinned_share=share)
    pinned: dict[str, set[tuple[int, ...]]] = {"": set(), "a": set(), "b": set()}
    for key, (salt, text, pages) in enumerate(steps):
        ids = [text] * (SIZE * pages)
        cached_text(index, pool, key, ids, salt)
        others = {each: set(paths) for each, paths in pinned.items() if each != salt}
        mine = pinned[salt]
        tokens = index.pin(ids, salt, 60.0)
        mine |= {tuple(ids[:end]) for end in range(SIZE, tokens + 1, SIZE)}
        total = sum(map(len, pinned.values()))
        assert index.pins.num_pinned == total <= 12
        assert len(mine) <= (12 * share if salt else 12)
        if tokens < len(ids):
            assert total == 12 or (salt and len(mine) == 12 * share), "a pin is refused for want of room alone"
        for each, paths in others.items():
            assert all(index.pin(list(path), each, 60.0) == len(path) for path in paths)


def test_a_pinned_page_is_lost_last_on_the_cpu_too() -> None:
    pool, cpu = PagePool(4, SIZE), PagePool(2, SIZE)
    index = RadixCache([pool], [KVCacheGroup()], None, lambda: 0.0, (cpu,), pinned_share=1.0)
    for key in range(4):
        cached_text(index, pool, key, [key, key])
    assert index.pin([0, 0], "", 60.0) and index.pin([1, 1], "", 60.0)
    transfers = PageTransfers()
    index.evict(0, 4, transfers)
    assert [index.match_prefix([key, key, 0]).num_tokens for key in range(4)] == [SIZE, SIZE, 0, 0]
    cached_text(index, pool, 4, [4, 4])
    index.evict(0, 1, transfers)  # of a CPU full of pinned pages it gets none
    assert [index.match_prefix([key, key, 0]).num_tokens for key in (0, 1, 4)] == [SIZE, SIZE, 0]
    assert index.allocate_cpu_page(0) != NULL_PAGE, "a request that needs the place gets it"
