"""A tree of pages of tokens, and where what was computed for them lies: here, on the host, or nowhere.

    root(salt) -- page of tokens 0.. -- page of tokens S.. -- ...        a node: one full page a table, or none

Nothing depends on a hash being unique: children are found by their whole page of tokens. Integers only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

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


class Tree:
    """Keeps every page of its nodes (see PagePool.keep), and the places on the host where pages lie for which there was
    no room."""

    def __init__(self, pools: Sequence[PagePool], tables: Sequence[Table], host: Sequence[PagePool]):
        self.pools, self.tables, self.host = tuple(pools), tuple(tables), tuple(host)
        self.size = self.pools[0].page_size
        self.roots: dict[str, Node] = {}
        self.node_of: tuple[dict[int, Node], ...] = tuple({} for _ in self.pools)
        self.hosted: tuple[OrderedDict[int, Node], ...] = tuple(OrderedDict() for _ in self.pools)  # oldest first
        self._freed: list[tuple[int, int]] = []

    def walk(self, ids: Sequence[int], salt: str) -> Iterator[Node]:
        """The nodes of the longest known prefix of `ids`, less its last token."""
        node = self.roots.get(salt)
        for end in range(self.size, len(ids), self.size):
            node = node.children.get(tuple(ids[end - self.size : end])) if node is not None else None
            if node is None:
                return
            yield node

    def lengthen(self, path: list[Node], ids: Sequence[int], salt: str, full: int, now: float) -> None:
        """`path` up to `full` pages of tokens; nodes that do not exist yet are made."""
        if len(path) >= full:
            return
        if path:
            path[-1].users -= 1
        elif salt not in self.roots:
            self.roots[salt] = Node(salt, None, len(self.pools), now)
        node = path[-1] if path else self.roots[salt]
        for place in range(len(path), full):
            tokens = tuple(ids[place * self.size : (place + 1) * self.size])
            below = node.children.get(tokens)
            if below is None:
                below = node.children[tokens] = Node(tokens, node, len(self.pools), now)
            below.used = now
            path.append(below)
            node = below
        node.users += 1

    def keep(self, node: Node, table: int, page: int) -> None:
        """What belongs to `node` stands in `page`, which a sequence holds."""
        self.free_place(node, table)  # here is as good as there
        self.pools[table].keep(page)
        node.pages[table], self.node_of[table][page] = page, node

    def drop(self, node: Node, table: int) -> list[int]:
        """Give up a node's page; returns it where that made it free."""
        page, node.pages[table] = node.pages[table], NULL_PAGE
        del self.node_of[table][page]
        freed = self.pools[table].give_up(page)
        self._freed += [(table, page) for page in freed]
        return freed

    def freed(self) -> list[tuple[int, int]]:
        """The pages, with their tables, that became free since this was last asked."""
        freed, self._freed = self._freed, []
        return freed

    def lost(self, node: Node, table: int) -> None:
        """A node's page of `table` is gone; where every later query reads it, the node's others are of no use."""
        if self.tables[table].back is None:
            for t, page in enumerate(node.pages):
                self.free_place(node, t)
                if page != NULL_PAGE and page in self.pools[t].idle:
                    self.drop(node, t)
        self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Take nodes that hold nothing and lead nowhere out of the tree."""
        while node is not None and not node.children and not node.users and not any(node.pages + node.places):
            if isinstance(node.tokens, str):
                self.roots.pop(node.tokens, None)
            elif node.parent is not None:
                node.parent.children.pop(node.tokens, None)
            node = node.parent

    def place(self, table: int) -> int:
        """A place on the host that was free, or that of the page that has lain there longest; NULL_PAGE for none."""
        if not self.host:
            return NULL_PAGE
        if not self.host[table].free and self.hosted[table]:
            node = next(iter(self.hosted[table].values()))
            self.free_place(node, table)
            self.lost(node, table)
        return self.host[table].allocate(1)[0] if self.host[table].free else NULL_PAGE

    def lay(self, node: Node, table: int, place: int) -> None:
        """What belongs to `node` lies on the host from now on."""
        node.places[table], self.hosted[table][place] = place, node

    def lift(self, node: Node, table: int) -> int:
        """Where it lies; the place is the caller's now."""
        place, node.places[table] = node.places[table], NULL_PAGE
        del self.hosted[table][place]
        return place

    def free_place(self, node: Node, table: int) -> None:
        if node.places[table] != NULL_PAGE:
            self.host[table].release([self.lift(node, table)])

    def clear(self) -> None:
        for t, (nodes, hosted) in enumerate(zip(self.node_of, self.hosted, strict=True)):
            for node in list(nodes.values()):
                self.drop(node, t)
            for node in list(hosted.values()):
                self.free_place(node, t)
        self.roots = {}
