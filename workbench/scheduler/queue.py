"""Queue waiting sequences in order of arrival, and share pages between sequences of one request."""

from __future__ import annotations

import bisect

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import PagePool
from workbench.request import Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.plan import RequestDecision
from workbench.scheduler.views import RequestViews


class WaitingQueue:
    """The waiting sequences, all sequences that a policy may name by id, and the policy's views of them."""

    def __init__(self, pools: tuple[PagePool, ...], views: RequestViews):
        self.sequences: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}
        self._holding: dict[int, Sequence] = {}  # waiting sequences that hold or held shared pages, by arrival index
        self.changed = True  # a request arrived since the last policy call
        self._pools, self._views = pools, views

    def add(self, parent: Sequence, *children: Sequence) -> None:
        """Queue `parent`; its `children` start from its pages once it has computed their common prefix."""
        if not parent.pages:
            parent.pages = tuple([] for _ in self._pools)
        parent.parent, parent.children = None, list(children)
        for child in children:
            child.parent, child.children, child.pages = parent, [], tuple([] for _ in self._pools)
            shared = 0 if child.own_prompt else _common(parent.token_ids, child.token_ids)
            child.num_shared_tokens = min(shared, len(child.token_ids) - 1)
            self.by_id.pop(child.request_id, None)
            self._views.drop_running(child)
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
        """Return the youngest waiting sequence that has shared pages, not counting `but`; None if there is none."""
        for order in sorted(self._holding, reverse=True):
            if self._holding[order].num_computed_tokens and self._holding[order] is not but:
                return self._holding[order]
        return None

    def remove_child(self, child: Sequence) -> None:
        """Remove a finished child from its parent."""
        parent = child.parent
        assert parent is not None
        parent.children.remove(child)
        place = bisect.bisect_left(self.sequences, parent.arrival_index, key=_order)
        if place < len(self.sequences) and self.sequences[place] is parent:
            self._views.update_waiting(parent)


def _common(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    if one == other:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _order(sequence: Sequence) -> int:
    return sequence.arrival_index


class SequenceGroups:
    """The relations among running and waiting sequences: parents with children, and beams."""

    def __init__(self, manager: KVCacheManager, limits: SchedulerLimits, running: list[Sequence], queue: WaitingQueue):
        self._manager, self._limits, self._running, self._queue = manager, limits, running, queue

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Apply `limits` from now on when children start."""
        self._limits = limits

    def start_children(self, step: int, decisions: list[RequestDecision]) -> list[Sequence]:
        """Start the children whose common prefix the parent has computed; return them, and the parents that can now
        continue beyond it.
        """
        joined = []
        for parent in [s for s in self._running if s.children]:
            due = [child for child in parent.children if child.num_shared_tokens <= parent.num_computed_tokens]
            if not due:
                continue
            if not all(child.own_prompt for child in due):
                joined.append(parent)
            parent.children = [f for f in parent.children if f.num_shared_tokens > parent.num_computed_tokens]
            # Reserve slots for the beams of other searches.
            beams = sum(len(s.children) for s in self._running if s.beams and s is not parent)
            places = max(0, self._limits.max_num_seqs - len(self._running) - beams)
            for child in due[:places]:
                child.parent, child.scheduled_step = None, step
                if child.own_prompt:
                    self._manager.start(child, self._manager.match_prefix(child))
                    reason = f"admitted: the second stream of {parent.request_id}"
                else:
                    shared = self._manager.fork(parent, child)
                    child.cached_tokens += child.num_computed_tokens
                    child.shared_pages += shared
                    reason = f"admitted: shares {shared} pages with {parent.request_id}"
                self._queue.by_id[child.request_id] = child
                bisect.insort(self._running, child, key=lambda running: running.arrival_index)
                joined.append(child)
                decisions.append(RequestDecision(child.request_id, "admitted", reason))
            if late := due[places:]:
                self._manager.fork(parent, late[0])
                self._queue.add(*late)
        return joined

    def advance_beams(self, beams: list[Sequence], continuations: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Advance a beam search between two steps, after all beams have computed their known tokens.

        Args:
            beams: the beams of one search.
            continuations: (beam, next token) for each continuation.

        Returns:
            the sequence of each continuation, in order: the beam itself, or for its second continuation a beam without
            one, which frees its own pages and shares those of the continued beam.
        """
        parents = {id(parent) for parent, _ in continuations}
        idle = [beam for beam in beams if id(beam) not in parents]
        continued: list[Sequence] = []
        for parent, _ in continuations:
            chosen = parent
            if parent in continued:
                chosen = idle.pop()
                self._manager.free(chosen)
                chosen.token_ids = list(parent.token_ids)
                self._manager.fork(parent, chosen)
            continued.append(chosen)
        for chosen, (_, token) in zip(continued, continuations, strict=True):
            chosen.token_ids.append(token)
        return continued
