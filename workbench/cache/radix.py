"""A radix tree over full pages of tokens, with the pages (GPU or CPU) that hold their keys and values.

    root(salt) -- page of tokens 0.. -- page of tokens S.. -- ...        a node: one full page per cache group, or none

Children are found by their whole page of tokens, so nothing depends on a hash being unique. Integers only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from workbench.cache.pages import NULL_PAGE, PagePool
from workbench.cache.tables import Table


class Node:
    """A page of tokens that follows its parent's (a root's is its salt), with its pages and CPU pages by
    cache group."""

    __slots__ = ("children", "pages", "parent", "places", "tokens", "used", "users")

    def __init__(self, tokens: tuple[int, ...] | str, parent: Node | None, tables: int, now: float):
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.pages = [NULL_PAGE] * tables
        self.places = [NULL_PAGE] * tables
        self.users = 0  # sequences whose path ends here
        self.used = now  # time of the last match, insertion or release by a sequence


class Tree:
    """A tree that references every page of its nodes (see PagePool), and CPU pages for those swapped out."""

    def __init__(self, pools: Sequence[PagePool], tables: Sequence[Table], host: Sequence[PagePool]):
        self.pools, self.tables, self.host = tuple(pools), tuple(tables), tuple(host)
        self.size = self.pools[0].page_size
        self.roots: dict[str, Node] = {}
        self.node_of: tuple[dict[int, Node], ...] = tuple({} for _ in self.pools)
        self.hosted: tuple[OrderedDict[int, Node], ...] = tuple(OrderedDict() for _ in self.pools)  # oldest first
        self._freed: list[tuple[int, int]] = []

    def walk(self, ids: Sequence[int], salt: str) -> Iterator[Node]:
        """Yield the nodes of the longest known prefix of `ids` without its last token."""
        node = self.roots.get(salt)
        for end in range(self.size, len(ids), self.size):
            node = node.children.get(tuple(ids[end - self.size : end])) if node is not None else None
            if node is None:
                return
            yield node

    def lengthen(self, path: list[Node], ids: Sequence[int], salt: str, full: int, now: float) -> None:
        """Extend `path` to `num_full_pages` pages of tokens, creating missing nodes."""
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
        """Attach `page`, which a sequence holds, to `node`."""
        self.free_place(node, table)  # the page replaces its copy on the CPU
        self.pools[table].keep(page)
        node.pages[table], self.node_of[table][page] = page, node

    def drop(self, node: Node, table: int) -> list[int]:
        """Detach a node's page; return it if that freed it."""
        page, node.pages[table] = node.pages[table], NULL_PAGE
        del self.node_of[table][page]
        freed = self.pools[table].give_up(page)
        self._freed += [(table, page) for page in freed]
        return freed

    def freed(self) -> list[tuple[int, int]]:
        """Return the (group, page) pairs that became free since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def lost(self, node: Node, table: int) -> None:
        """Handle the loss of a node's page. If every later query reads that group, the node's other pages are useless
        and dropped."""
        if self.tables[table].back is None:
            for t, page in enumerate(node.pages):
                self.free_place(node, t)
                if page != NULL_PAGE and page in self.pools[t].idle:
                    self.drop(node, t)
        self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Remove nodes that hold nothing and lead nowhere."""
        while node is not None and not node.children and not node.users and not any(node.pages + node.places):
            if isinstance(node.tokens, str):
                self.roots.pop(node.tokens, None)
            elif node.parent is not None:
                node.parent.children.pop(node.tokens, None)
            node = node.parent

    def place(self, table: int) -> int:
        """Return a free CPU page, or that of the oldest swapped-out node; NULL_PAGE for none."""
        if not self.host:
            return NULL_PAGE
        if not self.host[table].free and self.hosted[table]:
            node = next(iter(self.hosted[table].values()))
            self.free_place(node, table)
            self.lost(node, table)
        return self.host[table].allocate(1)[0] if self.host[table].free else NULL_PAGE

    def lay(self, node: Node, table: int, place: int) -> None:
        """Record that the contents of `node` are in CPU page `cpu_page`."""
        node.places[table], self.hosted[table][place] = place, node

    def lift(self, node: Node, table: int) -> int:
        """Remove a node's CPU page from the tree and return it to the caller."""
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
