"""Pages that outlive their sequence, found again by what stands in them: a radix tree over full pages.

    root(salt) -- page of tokens 0.. -- page of tokens S.. -- ...        a node: one full page a table, or none

A page that no sequence holds any more is idle. It stays until its pool runs short (least recently used first, leaves
before what leads to them) or its time is over; where there is a host, it lies there before it is lost. Integers only;
nothing here depends on a hash being unique: children are found by their whole page of tokens.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workbench.cache.moves import Moves
from workbench.cache.pages import NULL_PAGE, PagePool
from workbench.cache.tables import Table


class Node:
    """A page of tokens that follows its parent's (a root's is its salt); `pages` has its page in each table,
    NULL_PAGE for none, and `places` where on the host it lies instead."""

    __slots__ = ("children", "pages", "parent", "places", "tokens", "used", "users")

    def __init__(self, tokens: tuple[int, ...] | str, parent: Node | None, tables: int, now: float):
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.pages = [NULL_PAGE] * tables
        self.places = [NULL_PAGE] * tables
        self.users = 0  # sequences whose path ends here
        self.used = now  # when it was last offered, entered or left by a finished sequence


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
    """One sequence's path in the tree, how many of its pages have been looked at by table, and which it entered."""

    path: list[Node]
    done: list[int]
    entered: list[tuple[Node, int]] = field(default_factory=list)


class PrefixIndex:
    """One for all requests of a runner. `ttl` is the life time in seconds after the last use, by `clock`; `host` are
    the places, by table, where pages may lie for which there is no room.

    Keeps every page of its nodes (see PagePool.keep), and for each sequence that it knows a lease.
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
        self.roots: dict[str, Node] = {}
        self._node_of: tuple[dict[int, Node], ...] = tuple({} for _ in self.pools)
        self._leases: dict[int, Lease] = {}
        self.host = tuple(host)
        self._hosted: tuple[OrderedDict[int, Node], ...] = tuple(OrderedDict() for _ in self.pools)  # oldest first

    @property
    def pages(self) -> int:
        """Pages it keeps, shared ones included."""
        return sum(len(nodes) for nodes in self._node_of)

    def match(self, ids: Sequence[int], salt: str = "") -> Offer:
        """What is known of `ids` for a request with `salt`; never all of them: the last must be computed."""
        now = self._expire()
        path = self._walk(ids, salt, now)
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
        places = []
        for t, _, node in offer.hosted:
            place, node.places[t] = node.places[t], NULL_PAGE
            del self._hosted[t][place]
            places.append(place)
        return places

    def fetched(self, key: int, node: Node, table: int, page: int) -> None:
        """What a node had on the host will stand in `page`, which sequence `key` holds."""
        self._keep(self._leases[key], node, table, page)

    def fork(self, key: int, other: int, tokens: int) -> None:
        """Sequence `other` goes on from the first `tokens` tokens of `key`."""
        lease = self._leases.get(key)
        if lease is not None:
            path = lease.path[: tokens // self.size]
            self._lease(other, path, len(path) * self.size)

    def enter(
        self, key: int, ids: Sequence[int], salt: str, computed: int, held: tuple[list[int], ...]
    ) -> list[tuple[int, int, int]]:
        """Keep the full pages of sequence `key` with `computed` tokens known; `held` are its pages.

        Where the same tokens already have a page, the sequence is to use that one: returns (table, place, page) for
        each such, which the caller holds from now on in place of its own.
        """
        lease = self._leases.get(key) or self._lease(key, [], 0)
        now = self.clock()
        adopted = []
        self._lengthen(lease, ids, salt, computed // self.size, now)
        for t, (table, pages) in enumerate(zip(self.tables, held, strict=True)):
            full = table.settled(computed) // self.size
            for place in range(lease.done[t], full):
                page, node = pages[place], lease.path[place]
                if page == NULL_PAGE or node.pages[t] == page:
                    continue
                if node.pages[t] == NULL_PAGE:
                    self._free_place(node, t)  # here is as good as there
                    self._keep(lease, node, t, page)
                else:
                    self.pools[t].share([node.pages[t]])
                    adopted.append((t, place, node.pages[t]))
            lease.done[t] = max(lease.done[t], full)
        return adopted

    def leave(self, key: int) -> None:
        """Sequence `key` is gone; what it entered stays. Called before its pages are released."""
        lease = self._leases.pop(key, None)
        if lease is None or not lease.path:
            return
        now = self.clock()
        for node in lease.path:
            node.used = now
        lease.path[-1].users -= 1
        self._prune(lease.path[-1])

    def discard(self, key: int) -> list[list[int]]:
        """Sequence `key` broke: what it entered may be broken too. Returns the pages that became free, by table."""
        freed: list[list[int]] = [[] for _ in self.pools]
        lease = self._leases.get(key)
        for node, t in lease.entered if lease is not None else ():
            self._free_place(node, t)
            if node.pages[t] != NULL_PAGE:
                freed[t] += self._drop(node, t)
        self.leave(key)
        return freed

    def evict(self, table: int, count: int, moves: Moves | None = None) -> None:
        """Free `count` idle pages of a table, which has as many, the least recently used first. `moves` tell of those
        that the host takes."""
        pool, nodes = self.pools[table], self._node_of[table]
        for _ in range(count):
            if not pool.idle:
                return
            page = next(iter(pool.idle))
            node = nodes[page]
            place = self._place(table) if moves is not None and moves.place(table, page) is None else NULL_PAGE
            if moves is not None:
                moves.forget(table, {page})
            if place == NULL_PAGE or moves is None:
                self._drop(node, table)
                self._lost(node, table)
            else:
                moves.saves.append((table, page, place))
                self._drop(node, table)
                node.places[table], self._hosted[table][place] = place, node

    def places(self, table: int) -> int:
        """Places on the host that can be had."""
        return self.host[table].free + len(self._hosted[table])

    def take_place(self, table: int) -> int:
        """A place on the host that was free, or that of the page there that was used least recently."""
        return self._place(table)

    def clear(self) -> None:
        """Give up every page; sequences under way keep theirs."""
        for t, nodes in enumerate(self._node_of):
            for node in list(nodes.values()):
                self._drop(node, t)
        for t, hosted in enumerate(self._hosted):
            for node in list(hosted.values()):
                self._free_place(node, t)
        for lease in self._leases.values():
            if lease.path:
                lease.path[-1].users -= 1
            lease.path, lease.done, lease.entered = [], [0] * len(self.pools), []
        self.roots = {}

    def _walk(self, ids: Sequence[int], salt: str, now: float) -> list[Node]:
        path: list[Node] = []
        node = self.roots.get(salt)
        for end in range(self.size, len(ids), self.size):
            node = node.children.get(tuple(ids[end - self.size : end])) if node is not None else None
            if node is None or self._over(node, now):
                break
            path.append(node)
        return path

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

    def _lengthen(self, lease: Lease, ids: Sequence[int], salt: str, full: int, now: float) -> None:
        """The lease's path up to `full` pages of tokens; nodes that do not exist yet are made."""
        if len(lease.path) >= full:
            return
        if lease.path:
            lease.path[-1].users -= 1
        elif salt not in self.roots:
            self.roots[salt] = Node(salt, None, len(self.pools), now)
        node = lease.path[-1] if lease.path else self.roots[salt]
        for place in range(len(lease.path), full):
            tokens = tuple(ids[place * self.size : (place + 1) * self.size])
            below = node.children.get(tokens)
            if below is None:
                below = node.children[tokens] = Node(tokens, node, len(self.pools), now)
            below.used = now
            lease.path.append(below)
            node = below
        node.users += 1

    def _expire(self) -> float:
        """Free idle pages whose time is over, oldest first; now."""
        now = self.clock()
        if self.ttl is not None:
            for t, pool in enumerate(self.pools):
                while pool.idle and self._over(node := self._node_of[t][next(iter(pool.idle))], now):
                    self._drop(node, t)
                    self._lost(node, t)
                hosted = self._hosted[t]
                while hosted and self._over(node := next(iter(hosted.values())), now):
                    self._free_place(node, t)
                    self._lost(node, t)
        return now

    def _over(self, node: Node, now: float) -> bool:
        return self.ttl is not None and now - node.used > self.ttl

    def _lost(self, node: Node, table: int) -> None:
        """A node's page of `table` is gone; where every later query reads it, the node's others are of no use."""
        if self.tables[table].back is None:
            for t, page in enumerate(node.pages):
                self._free_place(node, t)
                if page != NULL_PAGE and page in self.pools[t].idle:
                    self._drop(node, t)
        self._prune(node)

    def _keep(self, lease: Lease, node: Node, table: int, page: int) -> None:
        self.pools[table].keep(page)
        node.pages[table], self._node_of[table][page] = page, node
        lease.entered.append((node, table))

    def _place(self, table: int) -> int:
        if not self.host:
            return NULL_PAGE
        if not self.host[table].free and self._hosted[table]:
            node = next(iter(self._hosted[table].values()))
            self._free_place(node, table)
            self._lost(node, table)
        return self.host[table].allocate(1)[0] if self.host[table].free else NULL_PAGE

    def _free_place(self, node: Node, table: int) -> None:
        if node.places[table] != NULL_PAGE:
            place, node.places[table] = node.places[table], NULL_PAGE
            del self._hosted[table][place]
            self.host[table].release([place])

    def _drop(self, node: Node, table: int) -> list[int]:
        page, node.pages[table] = node.pages[table], NULL_PAGE
        del self._node_of[table][page]
        return self.pools[table].give_up(page)

    def _prune(self, node: Node | None) -> None:
        """Take nodes that hold nothing and lead nowhere out of the tree."""
        while node is not None and not node.children and not node.users and not any(node.pages + node.places):
            if isinstance(node.tokens, str):
                self.roots.pop(node.tokens, None)
            elif node.parent is not None:
                node.parent.children.pop(node.tokens, None)
            node = node.parent
