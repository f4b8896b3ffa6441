"""Queue waiting sequences in order of arrival."""

from __future__ import annotations

import bisect

from workbench.cache.pages import PagePool
from workbench.engine.views import RequestViews
from workbench.request import Sequence


class WaitingQueue:
    """Waiting sequences, and all sequences that a policy may name, by id. The policy's views are kept beside them."""

    def __init__(self, pools: tuple[PagePool, ...], views: RequestViews):
        self.sequences: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}
        self._holding: dict[int, Sequence] = {}  # by arrival index: waiting sequences that hold shared pages, or did
        self.changed = True  # a request arrived since the last policy call
        self._pools, self._views = pools, views

    def add(self, parent: Sequence, *children: Sequence) -> None:
        """Queue `parent`; `children` start on its pages once it has computed their common prefix."""
        if not parent.pages:
            parent.pages = tuple([] for _ in self._pools)
        parent.parent, parent.children = None, list(followers)
        for follower in followers:
            follower.parent, follower.children, follower.pages = parent, [], tuple([] for _ in self._pools)
            follower.num_shared_tokens = min(_common(parent.token_ids, follower.token_ids), len(follower.token_ids) - 1)
            self.by_id.pop(follower.request_id, None)
            self._views.drop_running(follower)
        bisect.insort(self.sequences, parent, key=_order)
        self.by_id[parent.request_id] = parent
        if parent.num_computed_tokens:
            self._holding[parent.arrival_index] = parent
        self._views.add_waiting(parent)
        self.changed = True

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence`, which starts or has finished."""
        del self.sequences[bisect.bisect_left(self.sequences, sequence.arrival_index, key=_order)]
        self._holding.pop(sequence.arrival_index, None)
        self._views.remove_waiting(sequence)

    def youngest_page_holder(self, but: Sequence | None = None) -> Sequence | None:
        """Return the youngest waiting sequence that holds shared pages, except `but`."""
        for order in sorted(self._holding, reverse=True):
            if self._holding[order].num_computed_tokens and self._holding[order] is not but:
                return self._holding[order]
        return None

    def remove_child(self, child: Sequence) -> None:
        """Remove a finished child from its parent."""
        leader = child.parent
        assert leader is not None
        leader.children.remove(child)
        place = bisect.bisect_left(self.sequences, leader.arrival_index, key=_order)
        if place < len(self.sequences) and self.sequences[place] is leader:
            self._views.update_waiting(leader)


def _common(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    if one == other:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _order(sequence: Sequence) -> int:
    return sequence.arrival_index
