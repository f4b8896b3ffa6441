"""Reuse pages across requests with the same prefix: a radix tree over full pages.

A page that no sequence references is evictable. It stays until its pool runs short or its TTL ends. Eviction takes the
least recently used first, leaves before their parents. With CPU pages it is swapped out before it is lost. Integers
only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.cache.moves import Moves
from workbench.cache.pages import NULL_PAGE, PagePool
from workbench.cache.radix import Node, Tree
from workbench.cache.tables import Table


@dataclass(frozen=True)
class Offer:
    """The longest known prefix: its tokens and each group's pages.

    NULL_PAGE marks a page that is not needed or must come from the CPU; `on_cpu` lists the latter as (group, index in
    the sequence, node).
    """

    tokens: int
    pages: tuple[list[int], ...]
    path: tuple[Node, ...] = ()
    hosted: tuple[tuple[int, int, Node], ...] = ()

    @property
    def shared(self) -> int:
        return sum(page != NULL_PAGE for pages in self.pages for page in pages) + len(self.hosted)

    def held(self, table: int) -> int:
        """Return the number of a group's pages that are not on the CPU."""
        return len(self.pages[table]) - sum(t == table for t, _, _ in self.hosted)

    def has(self, table: int, place: int) -> bool:
        """Return whether a page is offered for index `place`."""
        here = place < len(self.pages[table]) and self.pages[table][place] != NULL_PAGE
        return here or any((table, place) == (t, at) for t, at, _ in self.hosted)


@dataclass
class Lease:
    """A sequence's path in the tree, with visited pages by group. A stale path is from before `clear`, and inserts
    nothing."""

    path: list[Node]
    done: list[int]
    over: bool = False


class PrefixIndex:
    """A prefix cache for all requests of a runner.

    Args:
        pools: page pools, by cache group.
        groups: cache groups.
        ttl: seconds that an unused page stays after its last use; None: no limit.
        clock: returns seconds.
        cpu_pools: CPU page pools, by cache group; none without offloading.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        tables: Sequence[Table],
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        host: Sequence[PagePool] = (),
    ):
        self.pools, self.tables = tuple(pools), tuple(tables)
        self.size = self.pools[0].page_size
        self.ttl, self.clock = ttl, clock
        self.tree = Tree(pools, tables, host)
        self.written_tokens = 0  # new tokens inserted so far, each counted once for all groups
        self._leases: dict[int, Lease] = {}
        self._entered: dict[int, dict[tuple[Node, int], None]] = {}  # inserted by each unfinished sequence

    @property
    def pages(self) -> int:
        """Return the number of pages that it references, shared ones included."""
        return sum(len(nodes) for nodes in self.tree.node_of)

    def match(self, ids: Sequence[int], salt: str = "") -> Offer:
        """Return the known prefix of `ids` for requests with `salt`; never all of it, since the last token must be
        computed."""
        now = self._expire()
        path = list(itertools.takewhile(lambda node: not self._over(node, now), self.tree.walk(ids, salt)))
        unbroken = [self._unbroken(path, t) for t, table in enumerate(self.tables) if table.back is None]
        for count in range(len(path), 0, -1):
            offer = self._offer(path, count, unbroken)
            if offer is not None:
                return offer
        return Offer(0, tuple([] for _ in self.tables))

    def take(self, key: int, offer: Offer) -> None:
        """Reference the matched pages for sequence `key`."""
        now = self.clock()
        for pool, pages in zip(self.pools, offer.pages, strict=True):
            pool.share(page for page in pages if page != NULL_PAGE)
        for node in offer.path:
            node.used = now
        self._lease(key, list(offer.path), offer.tokens)

    def claim(self, offer: Offer) -> list[int]:
        """Return the CPU pages of a match, which belong to the caller from now on."""
        return [self.tree.lift(node, t) for t, _, node in offer.hosted]

    def fetched(self, key: int, node: Node, table: int, page: int) -> None:
        """Attach `page` of sequence `key`, which will hold what the node had on the CPU."""
        self._keep(key, node, table, page)

    def fork(self, key: int, other: int, tokens: int) -> None:
        """Start the path of sequence `other` as the first `tokens` tokens of sequence `key`."""
        lease = self._leases.get(key)
        if lease is not None:
            path = lease.path[: tokens // self.size]
            self._lease(other, path, len(path) * self.size).over = lease.over
            self._entered.setdefault(other, {}).update(self._entered.get(key, {}))

    def enter(
        self, key: int, ids: Sequence[int], salt: str, computed: int, held: tuple[list[int], ...]
    ) -> list[tuple[int, int, int]]:
        """Insert the full pages of sequence `key`, of which `computed` tokens are known.

        Returns:
            (group, index, page) for tokens with a page already: the caller references it in place of its own.
        """
        lease = self._leases.get(key) or self._lease(key, [], 0)
        adopted: list[tuple[int, int, int]] = []
        if lease.over:
            return adopted
        self.tree.lengthen(lease.path, ids, salt, computed // self.size, self.clock())
        for t, (table, pages) in enumerate(zip(self.tables, held, strict=True)):
            full = table.settled(computed) // self.size
            for place in range(lease.done[t], full):
                page, node = pages[place], lease.path[place]
                if page == NULL_PAGE:
                    continue
                if node.pages[t] == page:  # inserted by another sequence that shares it
                    self._entered.setdefault(key, {})[node, t] = None
                elif node.pages[t] == NULL_PAGE:
                    self.written_tokens += 0 if any(node.pages) or any(node.places) else self.size
                    self._keep(key, node, t, page)
                else:
                    self.pools[t].share([node.pages[t]])
                    adopted.append((t, place, node.pages[t]))
            lease.done[t] = max(lease.done[t], full)
        return adopted

    def leave(self, key: int) -> None:
        """End the path of sequence `key`, whose pages are released next; inserted pages stay."""
        lease = self._leases.pop(key, None)
        if lease is None or not lease.path:
            return
        now = self.clock()
        for node in lease.path:
            node.used = now
        lease.path[-1].users -= 1
        self.tree.prune(lease.path[-1])

    def end(self, key: int, broken: bool = False) -> list[list[int]]:
        """Forget sequence `key` for good. If it is `failed`, drop every page it ever inserted, before a preemption too.

        Returns:
            the pages that became free, by cache group.
        """
        freed: list[list[int]] = [[] for _ in self.pools]
        entered = self._entered.pop(key, {})
        for node, t in entered if broken else ():
            if node.places[t] == NULL_PAGE and node.pages[t] == NULL_PAGE:
                continue  # dropped since, and maybe no longer in the tree
            self.tree.free_place(node, t)
            if node.pages[t] != NULL_PAGE:
                freed[t] += self.tree.drop(node, t)
            self.tree.prune(node)
        return freed

    def evict(self, table: int, count: int, moves: Moves | None = None) -> None:
        """Free `count` evictable pages of a group in least-recently-used order; record swap-outs in `transfers`."""
        pool, tree = self.pools[table], self.tree
        for _ in range(count):
            if not pool.idle:
                return
            page = next(iter(pool.idle))
            node = tree.node_of[table][page]
            place = tree.place(table) if moves is not None and moves.place(table, page) is None else NULL_PAGE
            tree.drop(node, table)
            if moves is not None and place != NULL_PAGE:
                moves.saves.append((table, page, place))
                tree.lay(node, table, place)
            else:
                tree.lost(node, table)

    def freed(self) -> list[tuple[int, int]]:
        """Return the (group, page) pairs that it freed since the last call."""
        return self.tree.freed()

    def places(self, table: int) -> int:
        """Return the number of CPU pages that can be had."""
        return self.tree.host[table].free + len(self.tree.hosted[table])

    def take_place(self, table: int) -> int:
        """Return a free CPU page, or that of the oldest swapped-out page."""
        return self.tree.place(table)

    def clear(self) -> None:
        """Drop every page; sequences in progress keep theirs and insert none of them again."""
        for lease in self._leases.values():
            if lease.path:
                lease.path[-1].users -= 1
            lease.path, lease.over = [], True
        self._entered.clear()
        self.tree.clear()

    def _unbroken(self, path: list[Node], table: int) -> tuple[int, int]:
        """Return a group without a window, and the length of its unbroken run of pages on the path."""
        has = (node.pages[table] or node.places[table] for node in path)
        return table, next((place for place, page in enumerate(has) if page == NULL_PAGE), len(path))

    def _offer(self, path: list[Node], count: int, unbroken: list[tuple[int, int]]) -> Offer | None:
        """Build the match of a prefix of `count` pages of tokens; None if a page is missing."""
        tokens = count * self.size
        if any(self.tables[t].held(tokens, tokens, self.size)[1].stop > places for t, places in unbroken):
            return None
        found, hosted = [], []
        for t, table in enumerate(self.tables):
            first, rest = table.held(tokens, tokens, self.size)
            pages = [NULL_PAGE] * max(first.stop, rest.stop)
            for place in (*first, *rest):
                node = path[place]
                pages[place] = node.pages[t]
                if node.pages[t] == NULL_PAGE:
                    if node.places[t] == NULL_PAGE:
                        return None
                    hosted.append((t, place, node))
            found.append(pages)
        return Offer(tokens, tuple(found), tuple(path[:count]), tuple(hosted))

    def _lease(self, key: int, path: list[Node], tokens: int) -> Lease:
        done = [table.settled(tokens) // self.size for table in self.tables]
        lease = self._leases[key] = Lease(path, done)
        if path:
            path[-1].users += 1
        return lease

    def _expire(self) -> float:
        """Free evictable pages whose TTL is over, oldest first; return the present time."""
        now = self.clock()
        if self.ttl is not None:
            for t, (pool, hosted) in enumerate(zip(self.pools, self.tree.hosted, strict=True)):
                while pool.idle and self._over(node := self.tree.node_of[t][next(iter(pool.idle))], now):
                    self.tree.drop(node, t)
                    self.tree.lost(node, t)
                while hosted and self._over(node := next(iter(hosted.values())), now):
                    self.tree.free_place(node, t)
                    self.tree.lost(node, t)
        return now

    def _keep(self, key: int, node: Node, table: int, page: int) -> None:
        self.tree.keep(node, table, page)
        self._entered.setdefault(key, {})[node, table] = None

    def _over(self, node: Node, now: float) -> bool:
        return self.ttl is not None and now - node.used > self.ttl

