"""Share pages between sequences of one request: samples of a prompt and beams of a search."""

from __future__ import annotations

import bisect

from workbench.cache.holdings import KVCacheManager
from workbench.engine.limits import SchedulerLimits
from workbench.engine.plan import RequestDecision
from workbench.engine.queue import WaitingQueue
from workbench.request import Sequence


class SequenceGroups:
    """Parents, children and beams among the running and waiting sequences."""

    def __init__(self, holdings: KVCacheManager, limits: SchedulerLimits, running: list[Sequence], queue: WaitingQueue):
        self._holdings, self._limits, self._running, self._queue = holdings, limits, running, queue

    def start_children(self, step: int, decisions: list[RequestDecision]) -> list[Sequence]:
        """Start children whose parent has computed their common prefix; return them and their parents."""
        joined = []
        for leader in [s for s in self._running if s.children]:
            due = [follower for follower in leader.children if follower.num_shared_tokens <= leader.num_computed_tokens]
            if not due:
                continue
            joined.append(leader)
            leader.children = [f for f in leader.children if f.num_shared_tokens > leader.num_computed_tokens]
            # Beams of other searches will need their slots.
            beams = sum(len(s.children) for s in self._running if s.beams and s is not leader)
            places = max(0, self._limits.max_num_seqs - len(self._running) - beams)
            for follower in due[:places]:
                follower.parent, follower.scheduled_step = None, step
                shared = self._holdings.fork(leader, follower)
                follower.cached_tokens += follower.num_computed_tokens
                follower.shared_pages += shared
                self._queue.by_id[follower.request_id] = follower
                bisect.insort(self._running, follower, key=lambda running: running.arrival_index)
                joined.append(follower)
                reason = f"admitted: shares {shared} pages with {leader.request_id}"
                decisions.append(RequestDecision(follower.request_id, "admitted", reason))
            if late := due[places:]:
                self._holdings.fork(leader, late[0])
                self._queue.add(*late)
        return joined

    def advance_beams(self, beams: list[Sequence], continuations: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Advance a beam search between two steps, after all beams have computed what they know.

        Args:
            beams: the beams of one search.
            continuations: (beam, next token) for each continuation.

        Returns:
            the sequence of each continuation, in order: the beam itself, or for a second token of its text a beam
            without continuation, which frees its pages and shares those of that text.
        """
        parents = {id(parent) for parent, _ in continuations}
        idle = [mate for mate in beams if id(mate) not in parents]
        continued: list[Sequence] = []
        for parent, _ in continuations:
            heir = parent
            if parent in continued:
                heir = idle.pop()
                self._holdings.free(heir)
                heir.token_ids = list(parent.token_ids)
                self._holdings.fork(parent, heir)
            continued.append(heir)
        for heir, (_, token) in zip(continued, continuations, strict=True):
            heir.token_ids.append(token)
        return continued
