"""Share pages between sequences of one request: samples of a prompt and beams of a search."""

from __future__ import annotations

import bisect

from workbench.cache.holdings import Holdings
from workbench.engine.limits import Limits
from workbench.engine.plan import Decision
from workbench.engine.queue import Queue
from workbench.request import Sequence


class Families:
    """Parents, children and beams among the running and waiting sequences."""

    def __init__(self, holdings: Holdings, limits: Limits, running: list[Sequence], queue: Queue):
        self._holdings, self._limits, self._running, self._queue = holdings, limits, running, queue

    def join(self, step: int, decisions: list[Decision]) -> list[Sequence]:
        """Start children whose parent has computed their common prefix; return them and their parents."""
        joined = []
        for leader in [s for s in self._running if s.followers]:
            due = [follower for follower in leader.followers if follower.joins <= leader.computed]
            if not due:
                continue
            joined.append(leader)
            leader.followers = [f for f in leader.followers if f.joins > leader.computed]
            # Beams of other searches will need their slots.
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
        """Advance a beam search between two steps, after all beams have computed what they know.

        Args:
            beams: the beams of one search.
            continuations: (beam, next token) for each continuation.

        Returns:
            the sequence of each continuation, in order: the beam itself, or for a second token of its text a beam
            without continuation, which frees its pages and shares those of that text.
        """
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
