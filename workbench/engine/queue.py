"""Who waits, in order of arrival."""

from __future__ import annotations

import bisect

from workbench.cache.pages import PagePool
from workbench.engine.views import Views
from workbench.request import Sequence


class Queue:
    """Sequences that wait, and by their ids those that a policy may name. What a policy sees of them is kept beside."""

    def __init__(self, pools: tuple[PagePool, ...], views: Views):
        self.sequences: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}
        self._holding: dict[int, Sequence] = {}  # by order: those that wait on pages which they share, or did
        self.changed = True  # somebody came since the policy looked at them
        self._pools, self._views = pools, views

    def add(self, leader: Sequence, *followers: Sequence) -> None:
        """`leader` waits; `followers` begin on its pages once it has computed what they have in common."""
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
        """`sequence` begins, or has ended."""
        del self.sequences[bisect.bisect_left(self.sequences, sequence.order, key=_order)]
        self._holding.pop(sequence.order, None)
        self._views.waits_no_more(sequence)

    def youngest_holder(self, but: Sequence | None = None) -> Sequence | None:
        """The youngest of those that wait on pages which they share, `but` left out."""
        for order in sorted(self._holding, reverse=True):
            if self._holding[order].computed and self._holding[order] is not but:
                return self._holding[order]
        return None

    def lost(self, follower: Sequence) -> None:
        """`follower`, which waits for its leader, has ended."""
        leader = follower.leader
        assert leader is not None
        leader.followers.remove(follower)
        place = bisect.bisect_left(self.sequences, leader.order, key=_order)
        if place < len(self.sequences) and self.sequences[place] is leader:
            self._views.changed(leader)


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with that are the same."""
    if one == other:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _order(sequence: Sequence) -> int:
    return sequence.order
