"""Queue waiting sequences in order of arrival."""

from __future__ import annotations

import bisect

from workbench.cache.pages import PagePool
from workbench.engine.views import Views
from workbench.request import Sequence


class Queue:
    """Waiting sequences, and all sequences that a policy may name, by id. The policy's views are kept beside them."""

    def __init__(self, pools: tuple[PagePool, ...], views: Views):
        self.sequences: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}
        self._holding: dict[int, Sequence] = {}  # by arrival index: waiting sequences that hold shared pages, or did
        self.changed = True  # a request arrived since the last policy call
        self._pools, self._views = pools, views

    def add(self, leader: Sequence, *followers: Sequence) -> None:
        """Queue `parent`; `children` start on its pages once it has computed their common prefix."""
        if not leader.pages:
            leader.pages = tuple([] for _ in self._pools)
        leader.leader, leader.followers = None, list(followers)
        for follower in followers:
            follower.leader, follower.followers, follower.pages = leader, [], tuple([] for _ in self._pools)
            follower.joins = min(_common(leader.token_ids, follower.token_ids), len(follower.token_ids) - 1)
            self.by_id.pop(follower.request_id, None)
            self._views.runs_no_more(follower)
        bisect.insort(self.sequences, leader, key=_order)
        self.by_id[leader.request_id] = leader
        if leader.computed:
            self._holding[leader.order] = leader
        self._views.waits(leader)
        self.changed = True

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence`, which starts or has finished."""
        del self.sequences[bisect.bisect_left(self.sequences, sequence.order, key=_order)]
        self._holding.pop(sequence.order, None)
        self._views.waits_no_more(sequence)

    def youngest_holder(self, but: Sequence | None = None) -> Sequence | None:
        """Return the youngest waiting sequence that holds shared pages, except `but`."""
        for order in sorted(self._holding, reverse=True):
            if self._holding[order].computed and self._holding[order] is not but:
                return self._holding[order]
        return None

    def lost(self, follower: Sequence) -> None:
        """Remove a finished child from its parent."""
        leader = follower.leader
        assert leader is not None
        leader.followers.remove(follower)
        place = bisect.bisect_left(self.sequences, leader.order, key=_order)
        if place < len(self.sequences) and self.sequences[place] is leader:
            self._views.changed(leader)


def _common(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    if one == other:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _order(sequence: Sequence) -> int:
    return sequence.order
