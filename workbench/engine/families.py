"""Sequences that share pages: samples of one prompt and the beams of a search begin on pages of the first of them."""

from __future__ import annotations

import bisect

from workbench.cache.holdings import Holdings
from workbench.engine.limits import Limits
from workbench.engine.plan import Decision
from workbench.engine.queue import Queue
from workbench.request import Sequence


class Families:
    """The scheduler's running sequences and its queue, as far as one is another's leader, follower or mate."""

    def __init__(self, holdings: Holdings, limits: Limits, running: list[Sequence], queue: Queue):
        self._holdings, self._limits, self._running, self._queue = holdings, limits, running, queue

    def join(self, step: int, decisions: list[Decision]) -> list[Sequence]:
        """Followers join whose leader has computed what they have in common; they, and leaders."""
        joined = []
        for leader in [s for s in self._running if s.followers]:
            due = [follower for follower in leader.followers if follower.joins <= leader.computed]
            if not due:
                continue
            joined.append(leader)
            leader.followers = [f for f in leader.followers if f.joins > leader.computed]
            # Beams of other searches will need their places.
            beams = sum(len(s.followers) for s in self._running if s.mates and s is not leader)
            places = max(0, self._limits.max_num_seqs - len(self._running) - beams)
            for follower in due[:places]:
                follower.leader, follower.began = None, step
                shared = self._holdings.fork(leader, follower)
                follower.cached_tokens += follower.computed
                follower.shared_pages += shared
                self._queue.by_id[follower.request_id] = follower
                bisect.insort(self._running, follower, key=lambda running: running.order)
                joined.append(follower)
                reason = f"admitted: shares {shared} pages with {leader.request_id}"
                decisions.append(Decision(follower.request_id, "admitted", reason))
            if late := due[places:]:
                self._holdings.fork(leader, late[0])
                self._queue.add(*late)
        return joined

    def branch(self, mates: list[Sequence], going: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Between two steps, when all `mates` have computed what they know: each of `going` is one of them, whose text
        goes on, and its next token. Returns who does so, in that order: the mate itself, and for a second token of the
        same text one whose own goes nowhere, which gives up its pages and holds that text's."""
        parents = {id(parent) for parent, _ in going}
        idle = [mate for mate in mates if id(mate) not in parents]
        heirs: list[Sequence] = []
        for parent, _ in going:
            heir = parent
            if parent in heirs:
                heir = idle.pop()
                self._holdings.release(heir)
                heir.token_ids = list(parent.token_ids)
                self._holdings.fork(parent, heir)
            heirs.append(heir)
        for heir, (_, token) in zip(heirs, going, strict=True):
            heir.token_ids.append(token)
        return heirs
