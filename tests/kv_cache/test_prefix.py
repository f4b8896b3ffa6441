"""The prefix index under random histories, against a list of what was entered and not given up."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.thorough import tries
from workbench.kv_cache.pages import NULL_PAGE, KVCacheGroup, PagePool
from workbench.kv_cache.prefix import RadixCache

SIZE, PAGES, TTL = 2, 14, 10.0
LAYOUTS = [
    (KVCacheGroup(),),
    (KVCacheGroup(), KVCacheGroup(sliding_window=3)),
    (KVCacheGroup(sliding_window=5, num_sink_tokens=1),),
    (KVCacheGroup(residual_length=3, quant_group=2), KVCacheGroup(sliding_window=5)),
]


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


class Index(RuleBasedStateMachine):
    """Sequences begin on what is offered, grow, enter their pages, leave or break; pools run short, time passes."""

    @initialize(tables=st.sampled_from(LAYOUTS), ttl=st.sampled_from([None, TTL]), seed=st.integers(0, 10**6))
    def begin(self, tables: tuple[KVCacheGroup, ...], ttl: float | None, seed: int) -> None:
        self.tables, self.ttl, self.now, self.draw = tables, ttl, 0.0, random.Random(seed)
        self.pools = tuple(PagePool(PAGES, SIZE) for _ in tables)
        self.index = RadixCache(self.pools, tables, ttl, lambda: self.now)
        self.holders: list[Holder] = []
        # By table, salt and all tokens up to the end of a page: the page, who entered it, and when it was last used.
        self.known: list[dict[tuple[str, tuple[int, ...]], tuple[int, int]]] = [{} for _ in tables]
        self.used: dict[tuple[str, tuple[int, ...]], float] = {}
        self.idle: list[list[int]] = [[] for _ in tables]  # in the order in which they became so
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
            if self.ttl is not None and self.now - self.used.get(place, -99.0) > self.ttl:
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
            assert self.known[t][holder.salt, tuple(holder.ids[: (place + 1) * SIZE])][0] == page
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
            self.used[holder.salt, tuple(holder.ids[: (place + 1) * SIZE])] = self.now
        holder.known = holder.computed // SIZE
        for t, table in enumerate(self.tables):
            for place in range(table.quantized_until(holder.computed) // SIZE):
                key, page = (holder.salt, tuple(holder.ids[: (place + 1) * SIZE])), holder.pages[t][place]
                entered = page != NULL_PAGE and (t, place) not in adopted and key not in self.known[t]
                if entered and self.pools[t].is_cached(page):
                    self.known[t][key] = page, holder.key

    def allocate(self, table: int, count: int) -> list[int]:
        pool = self.pools[table]
        short = count - pool.num_free
        if short > 0:
            oldest = self.idle[table][:short]
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
        oldest, younger = self.idle[table][:count], self.idle[table][count:]
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
            self.used[holder.salt, tuple(holder.ids[: (place + 1) * SIZE])] = self.now
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
TestIndex.settings = settings(max_examples=tries(150), stateful_step_count=40, deadline=None)


def test_equal_hashes_are_not_equal_prompts() -> None:
    pool = PagePool(4, SIZE)
    index = RadixCache([pool], [KVCacheGroup()])
    mine, other = [Same(1), Same(2), Same(3)], [Same(2), Same(1), Same(3)]
    assert hash(tuple(mine[:2])) == hash(tuple(other[:2])) and mine != other
    pages = pool.allocate(1)
    index.insert(0, mine, "", 2, (pages,))
    assert index.match_prefix(mine).pages == (pages,) and index.match_prefix(other).num_tokens == 0
    assert index.match_prefix(mine, "another tenant").num_tokens == 0


@pytest.mark.parametrize("ids", [[1], [1, 2]])
def test_the_last_token_is_never_offered(ids: list[int]) -> None:
    pool = PagePool(4, SIZE)
    index = RadixCache([pool], [KVCacheGroup()])
    index.insert(0, ids, "", len(ids), (pool.allocate(1),))
    assert (
        index.match_prefix(ids).num_tokens == 0 and index.match_prefix([*ids, 1]).num_tokens == len(ids) // SIZE * SIZE
    )
