"""Pin prefixes: a promise to evict them last, until a time. Integers only.

A pin only orders eviction. It is no reference: where nothing else is left, pinned pages are evicted too, those whose
pins end first before the others, so a pin never makes a request wait or fail.

    evicted first |  not pinned, least recently used  |  pinned, by the end of the pin  | evicted last
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from workbench.kv_cache.radix_tree import RadixNode


class PrefixPins:
    """The pins of a prefix cache. All nodes before a pinned one are pinned at least as long.

    Args:
        max_nodes: nodes, each of one page a cache group, that may be pinned at once.
        clock: returns seconds.
        max_salt_nodes: those of one salt, which is a tenant's; `max_nodes` unless given. The empty salt is no tenant's.
    """

    def __init__(self, max_nodes: int, clock: Callable[[], float], max_salt_nodes: int | None = None):
        self.max_nodes, self.clock = max_nodes, clock
        self.max_salt_nodes = max_nodes if max_salt_nodes is None else max_salt_nodes
        # Pinned at some time, by salt; those whose pin has ended leave at the next pin.
        self._nodes: dict[RadixNode, str] = {}

    @property
    def num_pinned(self) -> int:
        """Return the number of nodes that are pinned now."""
        self._drop_ended()
        return len(self._nodes)

    def is_pinned(self, node: RadixNode) -> bool:
        return bool(node.pin_seconds) and self.clock() < node.pinned_until

    def pin(self, path: Sequence[RadixNode], seconds: float, salt: str = "") -> int:
        """Pin the nodes of `path`, which has this salt, from the first on, for `seconds` from now; a longer pin stays.

        Returns:
            the number of nodes that are pinned: fewer than asked where `max_nodes` are, or `max_salt_nodes` of its own.
        """
        self._drop_ended()
        now, counts = self.clock(), Counter(self._nodes.values())
        for place, node in enumerate(path):
            if node not in self._nodes:
                if len(self._nodes) >= self.max_nodes or (salt and counts[salt] >= self.max_salt_nodes):
                    return place
                self._nodes[node] = salt
                counts[salt] += 1
                node.pin_seconds = node.pinned_until = 0.0
            node.pin_seconds = max(node.pin_seconds, seconds)
            node.pinned_until = max(node.pinned_until, now + seconds)
        return len(path)

    def renew(self, nodes: Iterable[RadixNode]) -> None:
        """Let the pins of `nodes`, which a request was served from, count from now."""
        if self._nodes:
            now = self.clock()
            for node in nodes:
                if node.pin_seconds and now < node.pinned_until:
                    node.pinned_until = max(node.pinned_until, now + node.pin_seconds)

    def victims(self, pages: Iterable[int], node_of: Mapping[int, RadixNode], count: int) -> list[int]:
        """Return the first `count` of `pages`, in least-recently-used order, that are to be evicted."""
        free: list[int] = []
        pinned: list[int] = []
        for page in pages:
            if len(free) == count:
                return free
            (pinned if self._nodes and self.is_pinned(node_of[page]) else free).append(page)
        pinned.sort(key=lambda page: node_of[page].pinned_until)  # of one path the last leaves first: sorting is stable
        return (free + pinned)[:count]

    def clear(self) -> None:
        self._nodes.clear()

    def _drop_ended(self) -> None:
        now = self.clock()
        self._nodes = {node: salt for node, salt in self._nodes.items() if now < node.pinned_until and node.is_attached}
