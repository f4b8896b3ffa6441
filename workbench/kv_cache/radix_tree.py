"""Store a radix tree over full pages of tokens, with the pages (GPU or CPU) of their keys and values.

    root(salt) -- page of tokens 0.. -- page of tokens S.. -- ...        a node: one full page per cache group, or none

Children are looked up by their whole page of tokens, so hash collisions do no harm. Integers only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from workbench.kv_cache.pages import NULL_PAGE, KVCacheGroup, PagePool


class RadixNode:
    """One page of tokens, which follows its parent's page (a root has a salt instead), with its pages and CPU pages by
    cache group.
    """

    __slots__ = (
        "children", "cpu_pages", "last_used", "pages", "parent", "pin_seconds", "pinned_until", "ref_count", "tokens",
    )  # fmt: skip

    def __init__(self, tokens: tuple[int, ...] | str, parent: RadixNode | None, num_groups: int, now: float):
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[int, ...], RadixNode] = {}
        self.pages = [NULL_PAGE] * num_groups
        self.cpu_pages = [NULL_PAGE] * num_groups
        self.ref_count = 0  # number of sequences with a path that ends here
        self.last_used = now  # time of the last match, insertion or release by a sequence
        self.pin_seconds = self.pinned_until = 0.0  # see pins.py: duration of the pin after a use, and its end

    @property
    def is_attached(self) -> bool:
        """Return whether the node is still in the tree."""
        assert not isinstance(self.tokens, str)  # a root has no page of tokens
        return self.parent is not None and self.parent.children.get(self.tokens) is self


class RadixTree:
    """A tree of cached pages: it has a reference to every page of its nodes (see PagePool), and owns CPU pages of nodes
    that were swapped out.
    """

    def __init__(self, pools: Sequence[PagePool], groups: Sequence[KVCacheGroup], cpu_pools: Sequence[PagePool]):
        self.pools, self.groups, self.cpu_pools = tuple(pools), tuple(groups), tuple(cpu_pools)
        self.page_size = self.pools[0].page_size
        self.roots: dict[str, RadixNode] = {}
        self.node_of: tuple[dict[int, RadixNode], ...] = tuple({} for _ in self.pools)
        self.on_cpu: tuple[OrderedDict[int, RadixNode], ...] = tuple(OrderedDict() for _ in self.pools)  # oldest first
        self._freed: list[tuple[int, int]] = []

    def match_prefix(self, ids: Sequence[int], salt: str) -> Iterator[RadixNode]:
        """Yield the nodes of the longest cached prefix of `ids`, not counting its last token."""
        node = self.roots.get(salt)
        for end in range(self.page_size, len(ids), self.page_size):
            node = node.children.get(tuple(ids[end - self.page_size : end])) if node is not None else None
            if node is None:
                return
            yield node

    def insert(self, path: list[RadixNode], ids: Sequence[int], salt: str, num_full_pages: int, now: float) -> None:
        """Extend `path` to `num_full_pages` pages of tokens, creating missing nodes."""
        if len(path) >= num_full_pages:
            return
        if path:
            path[-1].ref_count -= 1
        elif salt not in self.roots:
            self.roots[salt] = RadixNode(salt, None, len(self.pools), now)
        node = path[-1] if path else self.roots[salt]
        for place in range(len(path), num_full_pages):
            tokens = tuple(ids[place * self.page_size : (place + 1) * self.page_size])
            below = node.children.get(tokens)
            if below is None:
                below = node.children[tokens] = RadixNode(tokens, node, len(self.pools), now)
            below.last_used = now
            path.append(below)
            node = below
        node.ref_count += 1

    def attach_page(self, node: RadixNode, group: int, page: int) -> None:
        """Attach a sequence's `page` to `node`."""
        self.free_cpu_page(node, group)  # the page replaces the CPU page
        self.pools[group].mark_cached(page)
        node.pages[group], self.node_of[group][page] = page, node

    def detach_page(self, node: RadixNode, group: int) -> list[int]:
        """Detach a node's page; return the page if it became free."""
        page, node.pages[group] = node.pages[group], NULL_PAGE
        del self.node_of[group][page]
        freed = self.pools[group].unmark_cached(page)
        self._freed += [(group, page) for page in freed]
        return freed

    def pop_freed(self) -> list[tuple[int, int]]:
        """Return the (group, page) pairs that became free since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def page_lost(self, node: RadixNode, group: int) -> None:
        """Update the tree after a node lost its page of a cache group. If every later query reads that group, the
        node's other pages are useless and are dropped too.
        """
        if self.groups[group].sliding_window is None:
            for t, page in enumerate(node.pages):
                self.free_cpu_page(node, t)
                if page != NULL_PAGE and self.pools[t].is_idle(page):
                    self.detach_page(node, t)
        self.prune(node)

    def prune(self, node: RadixNode | None) -> None:
        """Remove `node` if it is a leaf without pages, and then its parents in the same way."""
        while node is not None and not node.children and not node.ref_count and not any(node.pages + node.cpu_pages):
            if isinstance(node.tokens, str):
                self.roots.pop(node.tokens, None)
            elif node.parent is not None:
                node.parent.children.pop(node.tokens, None)
            node = node.parent

    def allocate_cpu_page(self, group: int, victim: Callable[[int], RadixNode | None]) -> int:
        """Return a free CPU page, or else the CPU page of the node that `victim` returns for a cache group; NULL_PAGE
        if there is none.
        """
        if not self.cpu_pools:
            return NULL_PAGE
        if not self.cpu_pools[group].num_free and (node := victim(group)) is not None:
            self.free_cpu_page(node, group)
            self.page_lost(node, group)
        return self.cpu_pools[group].allocate(1)[0] if self.cpu_pools[group].num_free else NULL_PAGE

    def set_cpu_page(self, node: RadixNode, group: int, cpu_page: int) -> None:
        """Record that the contents of `node` are in CPU page `cpu_page`."""
        node.cpu_pages[group], self.on_cpu[group][cpu_page] = cpu_page, node

    def take_cpu_page(self, node: RadixNode, group: int) -> int:
        """Remove a node's CPU page from the tree and return it to the caller."""
        place, node.cpu_pages[group] = node.cpu_pages[group], NULL_PAGE
        del self.on_cpu[group][place]
        return place

    def free_cpu_page(self, node: RadixNode, group: int) -> None:
        if node.cpu_pages[group] != NULL_PAGE:
            self.cpu_pools[group].release([self.take_cpu_page(node, group)])

    def clear(self) -> None:
        for t, (nodes, hosted) in enumerate(zip(self.node_of, self.on_cpu, strict=True)):
            for node in list(nodes.values()):
                self.detach_page(node, t)
            for node in list(hosted.values()):
                self.free_cpu_page(node, t)
        self.roots = {}
