"""Reuse pages across requests with the same prefix: a radix tree over full pages.

A page that no sequence references is evictable. It stays until its pool runs short or its TTL ends. Eviction takes the
least recently used first, leaves before their parents, and pinned prefixes last (see pins.py). With CPU pages, a page
is swapped out before it is lost. Integers only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from workbench.kv_cache.pages import NULL_PAGE, KVCacheGroup, PagePool, PageTransfers
from workbench.kv_cache.pins import PrefixPins
from workbench.kv_cache.radix_tree import RadixNode, RadixTree


@dataclass(frozen=True)
class PrefixMatch:
    """The longest cached prefix of a request: its tokens, and its pages by cache group.

    NULL_PAGE marks a page that is not needed or must be loaded from the CPU; `on_cpu` lists the latter as (group, index
    in the sequence, node).
    """

    num_tokens: int
    pages: tuple[list[int], ...]
    nodes: tuple[RadixNode, ...] = ()
    on_cpu: tuple[tuple[int, int, RadixNode], ...] = ()

    @property
    def num_shared_pages(self) -> int:
        return sum(page != NULL_PAGE for pages in self.pages for page in pages) + len(self.on_cpu)

    def num_resident_pages(self, group: int) -> int:
        """Return the number of pages of a cache group in the match that are not on the CPU."""
        return len(self.pages[group]) - sum(t == group for t, _, _ in self.on_cpu)

    def has_page(self, group: int, place: int) -> bool:
        """Return whether the match has a page for index `place` of the sequence's page list."""
        here = place < len(self.pages[group]) and self.pages[group][place] != NULL_PAGE
        return here or any((group, place) == (t, at) for t, at, _ in self.on_cpu)


@dataclass
class RadixPath:
    """A sequence's path in the tree, with its pages by cache group. A stale path was started before `clear` and inserts
    no pages.
    """

    nodes: list[RadixNode]
    num_visited_pages: list[int]
    is_stale: bool = False


class RadixCache:
    """A prefix cache for all requests of a runner.

    Args:
        pools: page pools, by cache group.
        groups: cache groups.
        ttl: lifetime in seconds of an unused page after its last use; None: no limit.
        clock: returns seconds.
        cpu_pools: CPU page pools, by cache group; none without offloading.
        pinned_share: fraction of each group's pages that may be pinned at once.
        tenant_pinned_share: fraction of the pinnable pages that the requests of one salt may pin.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        groups: Sequence[KVCacheGroup],
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_pools: Sequence[PagePool] = (),
        pinned_share: float = 0.5,
        tenant_pinned_share: float = 1.0,
    ):
        self.pools, self.groups = tuple(pools), tuple(groups)
        self.page_size = self.pools[0].page_size
        self.ttl, self.clock = ttl, clock
        self.tree = RadixTree(pools, groups, cpu_pools)
        max_pinned = int(pinned_share * min(pool.num_pages for pool in self.pools))
        self.pins = PrefixPins(max_pinned, clock, int(tenant_pinned_share * max_pinned))
        self.written_tokens = 0  # number of tokens inserted so far, counted once for all groups
        self._paths: dict[int, RadixPath] = {}
        self._entered: dict[int, dict[tuple[RadixNode, int], None]] = {}  # inserted by each unfinished sequence

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Use `clock` from now on to record the times of last use."""
        self.clock = self.pins.clock = clock

    @property
    def num_pages(self) -> int:
        """Return the number of cached pages, shared ones included."""
        return sum(len(nodes) for nodes in self.tree.node_of)

    def match_prefix(self, ids: Sequence[int], salt: str = "") -> PrefixMatch:
        """Return the cached prefix of `ids` for requests with `salt`. The match never includes the last token, which
        must be computed.
        """
        now = self._expire()
        path = list(itertools.takewhile(lambda node: not self._over(node, now), self.tree.match_prefix(ids, salt)))
        unbroken = [self._unbroken(path, t) for t, table in enumerate(self.groups) if table.sliding_window is None]
        for count in range(len(path), 0, -1):
            offer = self._offer(path, count, unbroken)
            if offer is not None:
                return offer
        return PrefixMatch(0, tuple([] for _ in self.groups))

    def acquire(self, key: int, match: PrefixMatch) -> None:
        """Add references to the matched pages, for the sequence `key`."""
        now = self.clock()
        for pool, pages in zip(self.pools, match.pages, strict=True):
            pool.acquire(page for page in pages if page != NULL_PAGE)
        for node in match.nodes:
            node.last_used = now
        self.pins.renew(match.nodes)
        self._start_path(key, list(match.nodes), match.num_tokens)

    def pin(self, ids: Sequence[int], salt: str, seconds: float) -> int:
        """Pin the whole pages of the prefix `ids` until `seconds` after their last use: they are evicted only if no
        other page can be.

        Returns:
            the number of pinned tokens: those of full pages in the tree, as far as `pinned_share` and
            `tenant_pinned_share` allow.
        """
        path = [*self.tree.match_prefix([*ids, 0], salt)]  # a match never includes the last token
        return self.pins.pin(path, seconds, salt) * self.page_size

    def take_cpu_pages(self, match: PrefixMatch) -> list[int]:
        """Return the CPU pages of a match; the caller owns them from now on."""
        return [self.tree.take_cpu_page(node, t) for t, _, node in match.on_cpu]

    def attach_page(self, key: int, node: RadixNode, group: int, page: int) -> None:
        """Attach `page` of the sequence `key` to `node`, whose contents will be loaded into it from the CPU."""
        self._keep(key, node, group, page)

    def fork(self, key: int, other: int, tokens: int) -> None:
        """Start the path of the sequence `other` with the first `tokens` tokens of the sequence `key`."""
        lease = self._paths.get(key)
        if lease is not None:
            path = lease.nodes[: tokens // self.page_size]
            self._start_path(other, path, len(path) * self.page_size).is_stale = lease.is_stale
            self._entered.setdefault(other, {}).update(self._entered.get(key, {}))

    def insert(
        self, key: int, ids: Sequence[int], salt: str, computed: int, pages: tuple[list[int], ...]
    ) -> list[tuple[int, int, int]]:
        """Insert the full pages of the sequence `key`, of which `computed` tokens are known, into the tree.

        Returns:
            (group, index, page) for each page of tokens that is already cached: the caller replaces its own page by it.
        """
        lease = self._paths.get(key) or self._start_path(key, [], 0)
        adopted: list[tuple[int, int, int]] = []
        if lease.is_stale:
            return adopted
        self.tree.insert(lease.nodes, ids, salt, computed // self.page_size, self.clock())
        for t, (table, group_pages) in enumerate(zip(self.groups, pages, strict=True)):
            full = table.quantized_until(computed) // self.page_size
            for place in range(lease.num_visited_pages[t], full):
                page, node = group_pages[place], lease.nodes[place]
                if page == NULL_PAGE:
                    continue
                if node.pages[t] == page:  # inserted by another sequence that shares it
                    self._entered.setdefault(key, {})[node, t] = None
                elif node.pages[t] == NULL_PAGE:
                    self.written_tokens += 0 if any(node.pages) or any(node.cpu_pages) else self.page_size
                    self._keep(key, node, t, page)
                else:
                    self.pools[t].acquire([node.pages[t]])
                    adopted.append((t, place, node.pages[t]))
            lease.num_visited_pages[t] = max(lease.num_visited_pages[t], full)
        return adopted

    def release(self, key: int) -> None:
        """End the path of sequence `key` before its pages are released; inserted pages stay."""
        lease = self._paths.pop(key, None)
        if lease is None or not lease.nodes:
            return
        now = self.clock()
        for node in lease.nodes:
            node.last_used = now
        lease.nodes[-1].ref_count -= 1
        self.tree.prune(lease.nodes[-1])

    def finish(self, key: int, failed: bool = False) -> list[list[int]]:
        """Forget the sequence `key`. If it `failed`, drop every page that it inserted, also before a preemption.

        Returns:
            the pages that became free, by cache group.
        """
        freed: list[list[int]] = [[] for _ in self.pools]
        entered = self._entered.pop(key, {})
        for node, t in entered if failed else ():
            if node.cpu_pages[t] == NULL_PAGE and node.pages[t] == NULL_PAGE:
                continue  # dropped in the meantime; the node may have left the tree
            self.tree.free_cpu_page(node, t)
            if node.pages[t] != NULL_PAGE:
                freed[t] += self.tree.detach_page(node, t)
            self.tree.prune(node)
        return freed

    def evict(self, group: int, count: int, transfers: PageTransfers | None = None) -> None:
        """Free `count` evictable pages of a group, the least recently used first and pinned ones last; record swap-outs
        in `transfers`."""
        pool, tree = self.pools[group], self.tree
        for page in self.pins.victims(pool.evictable, tree.node_of[group], count):
            node, place = tree.node_of[group][page], NULL_PAGE
            if transfers is not None and transfers.source_cpu_page(group, page) is None:
                # A pinned page is never lost in favour of an unpinned one.
                place = tree.allocate_cpu_page(group, self._victim_on_cpu if self.pins.is_pinned(node) else self._spare)
            tree.detach_page(node, group)
            if transfers is not None and place != NULL_PAGE:
                transfers.swap_outs.append((group, page, place))
                tree.set_cpu_page(node, group, place)
            else:
                tree.page_lost(node, group)

    def pop_freed(self) -> list[tuple[int, int]]:
        """Return the (group, page) pairs freed since the last call."""
        return self.tree.pop_freed()

    def num_available_cpu_pages(self, group: int) -> int:
        """Return the number of CPU pages that can be allocated."""
        return self.tree.cpu_pools[group].num_free + len(self.tree.on_cpu[group])

    def allocate_cpu_page(self, group: int) -> int:
        """Return a free CPU page of a cache group, or else the CPU page that is evicted next."""
        return self.tree.allocate_cpu_page(group, self._victim_on_cpu)

    def _victim_on_cpu(self, group: int) -> RadixNode | None:
        """Return the next victim: the node that loses its CPU page."""
        found = self.pins.victims(self.tree.on_cpu[group], self.tree.on_cpu[group], 1)
        return self.tree.on_cpu[group][found[0]] if found else None

    def _spare(self, group: int) -> RadixNode | None:
        """Return the node unless it is pinned."""
        node = self._victim_on_cpu(group)
        return None if node is None or self.pins.is_pinned(node) else node

    def drop_pages(self, group: int, pages: Iterable[int]) -> None:
        """Drop cached pages of a cache group that no sequence references."""
        for page in pages:
            if page in self.tree.node_of[group]:  # unless already dropped with its node
                node = self.tree.node_of[group][page]
                self.tree.detach_page(node, group)
                self.tree.page_lost(node, group)

    def clear(self) -> None:
        """Drop every page from the tree; running sequences keep their pages but do not insert them again."""
        for lease in self._paths.values():
            if lease.nodes:
                lease.nodes[-1].ref_count -= 1
            lease.nodes, lease.is_stale = [], True
        self._entered.clear()
        self.pins.clear()
        self.tree.clear()

    def _unbroken(self, path: list[RadixNode], table: int) -> tuple[int, int]:
        """Return a group without a window, and the number of consecutive pages that it has on the path."""
        has = (node.pages[table] or node.cpu_pages[table] for node in path)
        return table, next((place for place, page in enumerate(has) if page == NULL_PAGE), len(path))

    def _offer(self, path: list[RadixNode], count: int, unbroken: list[tuple[int, int]]) -> PrefixMatch | None:
        """Build the match of a prefix of `count` pages of tokens; None if a page is missing."""
        tokens = count * self.page_size
        if any(self.groups[t].pages_needed(tokens, tokens, self.page_size)[1].stop > places for t, places in unbroken):
            return None
        found, hosted = [], []
        for t, table in enumerate(self.groups):
            first, rest = table.pages_needed(tokens, tokens, self.page_size)
            pages = [NULL_PAGE] * max(first.stop, rest.stop)
            for place in (*first, *rest):
                node = path[place]
                pages[place] = node.pages[t]
                if node.pages[t] == NULL_PAGE:
                    if node.cpu_pages[t] == NULL_PAGE:
                        return None
                    hosted.append((t, place, node))
            found.append(pages)
        return PrefixMatch(tokens, tuple(found), tuple(path[:count]), tuple(hosted))

    def _start_path(self, key: int, path: list[RadixNode], tokens: int) -> RadixPath:
        done = [table.quantized_until(tokens) // self.page_size for table in self.groups]
        lease = self._paths[key] = RadixPath(path, done)
        if path:
            path[-1].ref_count += 1
        return lease

    def _expire(self) -> float:
        """Free evictable pages with an expired TTL, oldest first; return the current time."""
        now = self.clock()
        if self.ttl is not None:
            for t, (pool, hosted) in enumerate(zip(self.pools, self.tree.on_cpu, strict=True)):
                for node in list(self._expired(map(self.tree.node_of[t].__getitem__, pool.evictable), now)):
                    self.tree.detach_page(node, t)
                    self.tree.page_lost(node, t)
                for node in list(self._expired(hosted.values(), now)):
                    self.tree.free_cpu_page(node, t)
                    self.tree.page_lost(node, t)
        return now

    def _expired(self, nodes: Iterable[RadixNode], now: float) -> Iterator[RadixNode]:
        """Yield the nodes with an expired TTL, oldest first; pinned nodes may precede them."""
        for node in nodes:
            if self._over(node, now):
                yield node
            elif not self.pins.is_pinned(node):
                return

    def _keep(self, key: int, node: RadixNode, table: int, page: int) -> None:
        self.tree.attach_page(node, table, page)
        self._entered.setdefault(key, {})[node, table] = None

    def _over(self, node: RadixNode, now: float) -> bool:
        return self.ttl is not None and now - node.last_used > self.ttl and not self.pins.is_pinned(node)
