"""Pin prefixes for some time: pinned pages are evicted last. Integers only.

A pin only affects the order of eviction. It is not a reference: if no other page is left, pinned pages are evicted too,
in the order in which their pins end. So a pin never makes a request wait or fail.

    evicted first |  not pinned, least recently used  |  pinned, by the end of the pin  | evicted last
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from workbench.kv_cache.radix_tree import RadixNode


class PrefixPins:
    """The pinned nodes of a prefix cache. All nodes before a pinned node are pinned at least as long.

    Args:
        max_nodes: maximum number of nodes pinned at once; a node has one page per cache group.
        clock: returns seconds.
        max_salt_nodes: the maximum for one salt, i.e. one tenant; default `max_nodes`. The empty salt belongs to no
            tenant and has no such limit.
    """

    def __init__(self, max_nodes: int, clock: Callable[[], float], max_salt_nodes: int | None = None):
        self.max_nodes, self.clock = max_nodes, clock
        self.max_salt_nodes = max_nodes if max_salt_nodes is None else max_salt_nodes
        # Pinned nodes by salt; expired ones are removed at the next pin.
        self._nodes: dict[RadixNode, str] = {}

    @property
    def num_pinned(self) -> int:
        """Return the number of nodes that are pinned now."""
        self._drop_ended()
        return len(self._nodes)

    def is_pinned(self, node: RadixNode) -> bool:
        return bool(node.pin_seconds) and self.clock() < node.pinned_until

    def pin(self, path: Sequence[RadixNode], seconds: float, salt: str = "") -> int:
        """Pin the nodes of `path`, from the first on, for `seconds` from now under this salt; a longer pin stays
        unchanged.

        Returns:
            the number of nodes pinned; fewer if `max_nodes`, or `max_salt_nodes` of this salt, is reached.
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
        """Restart the pins of `nodes` now, since a request has used them."""
        if self._nodes:
            now = self.clock()
            for node in nodes:
                if node.pin_seconds and now < node.pinned_until:
                    node.pinned_until = max(node.pinned_until, now + node.pin_seconds)

    def victims(self, pages: Iterable[int], node_of: Mapping[int, RadixNode], count: int) -> list[int]:
        """Return `count` of `pages`, which are in least-recently-used order: those to evict first."""
        free: list[int] = []
        pinned: list[int] = []
        for page in pages:
            if len(free) == count:
                return free
            (pinned if self._nodes and self.is_pinned(node_of[page]) else free).append(page)
        pinned.sort(key=lambda page: node_of[page].pinned_until)  # stable: the last node of a path is evicted first
        return (free + pinned)[:count]

    def clear(self) -> None:
        self._nodes.clear()

    def _drop_ended(self) -> None:
        now = self.clock()
        self._nodes = {node: salt for node, salt in self._nodes.items() if now < node.pinned_until and node.is_attached}
