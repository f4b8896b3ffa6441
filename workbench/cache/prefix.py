"""Pages that outlive their sequence, found again by what stands in them: a radix tree over full pages.

A page that no sequence holds any more is idle. It stays until its pool runs short (least recently used first, leaves
before what leads to them) or its time is over; where there is a host, it lies there before it is lost. Integers only.
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
    """The longest known prefix: `tokens` of them, and each table's pages with NULL_PAGE where none is needed or where
    it must come from the host: `hosted` are (table, place in the sequence, node) of these."""

    tokens: int
    pages: tuple[list[int], ...]
    path: tuple[Node, ...] = ()
    hosted: tuple[tuple[int, int, Node], ...] = ()

    @property
    def shared(self) -> int:
        return sum(page != NULL_PAGE for pages in self.pages for page in pages) + len(self.hosted)

    def held(self, table: int) -> int:
        """How many of a table's pages are here."""
        return len(self.pages[table]) - sum(t == table for t, _, _ in self.hosted)

    def has(self, table: int, place: int) -> bool:
        """Whether something is offered for that place."""
        here = place < len(self.pages[table]) and self.pages[table][place] != NULL_PAGE
        return here or any((table, place) == (t, at) for t, at, _ in self.hosted)


@dataclass
class Lease:
    """One sequence's path in the tree, and how many of its pages have been looked at by table. `over`: the tree was
    cleared under it; what it holds is from before, and none of it is entered again."""

    path: list[Node]
    done: list[int]
    over: bool = False


class PrefixIndex:
    """One for all requests of a runner. `ttl` is the life time in seconds after the last use, by `clock`; `host` are
    the places, by table, where pages may lie for which there is no room."""

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
        self.written_tokens = 0  # entered so far where nothing was known of them, each once by all tables together
        self._leases: dict[int, Lease] = {}
        self._entered: dict[int, dict[tuple[Node, int], None]] = {}  # by each sequence, with its table, until it ends

    @property
    def pages(self) -> int:
        """Pages it keeps, shared ones included."""
        return sum(len(nodes) for nodes in self.tree.node_of)

    def match(self, ids: Sequence[int], salt: str = "") -> Offer:
        """What is known of `ids` for a request with `salt`; never all of them: the last must be computed."""
        now = self._expire()
        path = list(itertools.takewhile(lambda node: not self._over(node, now), self.tree.walk(ids, salt)))
        unbroken = [self._unbroken(path, t) for t, table in enumerate(self.tables) if table.back is None]
        for count in range(len(path), 0, -1):
            offer = self._offer(path, count, unbroken)
            if offer is not None:
                return offer
        return Offer(0, tuple([] for _ in self.tables))

    def take(self, key: int, offer: Offer) -> None:
        """Sequence `key` runs on what was offered: it becomes one more holder of those pages."""
        now = self.clock()
        for pool, pages in zip(self.pools, offer.pages, strict=True):
            pool.share(page for page in pages if page != NULL_PAGE)
        for node in offer.path:
            node.used = now
        self._lease(key, list(offer.path), offer.tokens)

    def claim(self, offer: Offer) -> list[int]:
        """Where what is `hosted` of an offer lies; these places are the caller's now."""
        return [self.tree.lift(node, t) for t, _, node in offer.hosted]

    def fetched(self, key: int, node: Node, table: int, page: int) -> None:
        """What a node had on the host will stand in `page`, which sequence `key` holds."""
        self._keep(key, node, table, page)

    def fork(self, key: int, other: int, tokens: int) -> None:
        """Sequence `other` goes on from the first `tokens` tokens of `key`."""
        lease = self._leases.get(key)
        if lease is not None:
            path = lease.path[: tokens // self.size]
            self._lease(other, path, len(path) * self.size).over = lease.over
            self._entered.setdefault(other, {}).update(self._entered.get(key, {}))

    def enter(
        self, key: int, ids: Sequence[int], salt: str, computed: int, held: tuple[list[int], ...]
    ) -> list[tuple[int, int, int]]:
        """Keep the full pages of sequence `key` with `computed` tokens known; `held` are its pages.

        Where the same tokens already have a page, the sequence is to use that one: returns (table, place, page) for
        each such, which the caller holds from now on in place of its own.
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
                if node.pages[t] == page:  # entered by another that shares it
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
        """Sequence `key` gives up its pages, which are released after this; what it entered stays."""
        lease = self._leases.pop(key, None)
        if lease is None or not lease.path:
            return
        now = self.clock()
        for node in lease.path:
            node.used = now
        lease.path[-1].users -= 1
        self.tree.prune(lease.path[-1])

    def end(self, key: int, broken: bool = False) -> list[list[int]]:
        """Sequence `key` will not come again, and leaves after this. What a `broken` one ever entered, before it was
        set back too, may be broken: it is forgotten. Returns the pages that became free, by table."""
        freed: list[list[int]] = [[] for _ in self.pools]
        entered = self._entered.pop(key, {})
        for node, t in entered if broken else ():
            if node.places[t] == NULL_PAGE and node.pages[t] == NULL_PAGE:
                continue  # given up since, and maybe no longer in the tree
            self.tree.free_place(node, t)
            if node.pages[t] != NULL_PAGE:
                freed[t] += self.tree.drop(node, t)
            self.tree.prune(node)
        return freed

    def evict(self, table: int, count: int, moves: Moves | None = None) -> None:
        """Free `count` idle pages of a table, which has as many, the least recently used first. `moves` tell of those
        that the host takes."""
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
        """The pages, with their tables, that it gave up since this was last asked and that are free."""
        return self.tree.freed()

    def places(self, table: int) -> int:
        """Places on the host that can be had."""
        return self.tree.host[table].free + len(self.tree.hosted[table])

    def take_place(self, table: int) -> int:
        """A place on the host that was free, or that of the page that has lain there longest."""
        return self.tree.place(table)

    def clear(self) -> None:
        """Give up every page; sequences under way keep theirs, and enter no more of them."""
        for lease in self._leases.values():
            if lease.path:
                lease.path[-1].users -= 1
            lease.path, lease.over = [], True
        self._entered.clear()
        self.tree.clear()

    def _unbroken(self, path: list[Node], table: int) -> tuple[int, int]:
        """A table whose queries read everything, and how many of the path's first nodes have a page in it."""
        has = (node.pages[table] or node.places[table] for node in path)
        return table, next((place for place, page in enumerate(has) if page == NULL_PAGE), len(path))

    def _offer(self, path: list[Node], count: int, unbroken: list[tuple[int, int]]) -> Offer | None:
        """Each table's pages for a prefix of `count` pages of tokens, or None where one is missing."""
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
        """Free idle pages whose time is over, oldest first; now."""
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

