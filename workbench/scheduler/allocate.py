"""Allocate one step: a single loop gives tokens, slots and pages to requests in a policy's order."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.prefix import PrefixMatch
from workbench.request import Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.plan import MAX_SCORED_TOKENS, RequestDecision, Span, num_scored_rows
from workbench.scheduler.policy import RequestView, RunningViews, SchedulerDecision, Turn
from workbench.scheduler.queue import WaitingQueue
from workbench.scheduler.validate import items_of
from workbench.scheduler.views import RequestViews

UNLIMITED = 2**62  # tokens of a turn


class StepAllocation:
    """The allocation of one step: the tokens that each sequence computes, and the pages for them.

    `serve` walks the policy's order once. A running sequence takes tokens. A waiting sequence takes a slot, tokens, and
    pages that no running sequence needs; admission stops at the first that cannot start. `allocate_pages` then
    allocates the pages that running sequences still need; if pages run out, the last sequence in the order `keep` is
    preempted.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        limits: SchedulerLimits,
        views: RequestViews,
        running: list[Sequence],
        queue: WaitingQueue,
        decisions: list[RequestDecision],
        step: int,
        policy: str,
    ):
        self.kv_cache_manager, self.limits, self.views = kv_cache_manager, limits, views
        self.running, self.queue, self.decisions = running, queue, decisions
        self.step, self.policy = step, policy
        self.tokens_left, self.prefill_tokens_left = limits.max_num_batched_tokens, limits.max_chunk_tokens
        self.scored_tokens_left = MAX_SCORED_TOKENS
        self.num_scheduled_tokens: dict[Sequence, int] = {}
        self.items: list[RequestView | Turn | RunningViews] = []  # valid items of the walked part of the order
        self.waiting: tuple[str, str] | None = None  # the first request that could not start, and the reason
        self.keep: list[RequestView] = []  # the policy's order of keeping pages, if it was needed
        self.preempted: list[RequestView] = []  # preempted by the policy
        self.errors: list[tuple[Sequence, str]] = []  # sequences to fail
        self.freed_pages = False  # a preemption freed pages
        self._without_turn: set[str] = set()  # ids of preempted and failed sequences
        self._unserved: set[Sequence] = set()  # running sequences that may still take tokens
        self._prefill_waits = False  # a prefill that may not be cut lacks tokens, so later prefills get none
        self._count_running()

    def _count_running(self) -> None:
        running = self.running
        self.prefills = [each for each in running if len(each.token_ids) - each.num_computed_tokens != 1]
        self.decodes = [*running]
        if self.prefills:
            self.decodes = [each for each in running if len(each.token_ids) - each.num_computed_tokens == 1]
        self.free_slots = self.limits.max_num_seqs - len(running) - _num_joining(self.prefills)
        self.reserve([s for s in running if len(s.token_ids) - s.num_evicted_tokens > s.allocated_until])

    def reserve(self, lacking: list[Sequence]) -> None:
        """Reserve pages for the running sequences `lacking`, which may need more."""
        manager, self.lacking = self.kv_cache_manager, lacking
        self.reserved_pages = [0 for _ in manager.pools]  # pages, by cache group
        for sequence in lacking:
            for group, pages in enumerate(manager.pages_to_allocate(sequence) or ()):
                self.reserved_pages[group] += pages

    @property
    def num_prefill_tokens(self) -> int:
        """Return the number of tokens that the step gives to prefills of more than one token and to starting
        requests.
        """
        return self.limits.max_chunk_tokens - self.prefill_tokens_left

    @property
    def lacks_pages(self) -> bool:
        """Return whether more pages are reserved than are free."""
        return self.kv_cache_manager.first_exhausted_group(self.reserved_pages) is not None

    def serve(self, decision: SchedulerDecision) -> None:
        """Preempt the requests that the policy's decision names, then serve requests in its order, each at most
        twice.
        """
        self._preempt_all(decision.preempted)
        self._unserved = set(self.running)
        for place, item in enumerate(items_of(decision.order, self.policy, len(self.queue.by_id))):
            if type(item) is RunningViews:
                if item.sequences is self.decodes or all(map(self._ran, item.sequences)):
                    self.items.append(item)
                    self.serve_running(item.sequences)
                else:
                    self._refuse("", f"entry {place} has the running requests of an earlier step")
                continue
            request, max_tokens = item if isinstance(item, Turn) else (item, UNLIMITED)
            sequence = self._find(request, f"entry {place}")
            if sequence is None:
                continue
            self.items.append(item)
            if type(max_tokens) is not int or max_tokens < 0:
                turn = f"gives {request.request_id} a turn of {max_tokens!r} tokens"
                self._fail(sequence, f"policy {self.policy}: {turn}; it must be a whole number from 0 on")
            elif sequence in self._unserved or sequence in self.num_scheduled_tokens:
                self.schedule(sequence, max_tokens)
            elif self.waiting is None:
                reason = decision.reasons.get(request.request_id) or self._admit(sequence, max_tokens)
                if reason:
                    self.waiting = sequence.request_id, f"not admitted: {reason}"
            if self.waiting is not None and not (self._unserved and self.tokens_left):
                break
        for paused in (self.decodes, self.running):  # some request must advance
            if not any(self.num_scheduled_tokens.values()):
                self.serve_running(paused)

    def serve_running(self, sequences: Iterable[Sequence]) -> None:
        """Schedule each of `sequences`, which are running, once."""
        is_first = not self.num_scheduled_tokens and not self._without_turn
        if sequences is self.decodes and is_first and len(self.decodes) <= self.tokens_left:
            self.num_scheduled_tokens = dict.fromkeys(self.decodes, 1)  # in one go: the common case
            self.tokens_left -= len(self.decodes)
            self._unserved = set(self.prefills)
            return
        for sequence in sequences:
            if sequence.request_id not in self._without_turn:
                self.schedule(sequence)

    def _ran(self, sequence: Sequence) -> bool:
        """Return whether a sequence ran when the policy was called."""
        served = sequence in self.num_scheduled_tokens or sequence.request_id in self._without_turn
        return served or sequence in self._unserved

    def schedule(self, sequence: Sequence, max_tokens: int = UNLIMITED) -> None:
        """Give a running sequence at most `max_tokens` tokens of the step."""
        before = self.num_scheduled_tokens.get(sequence, 0)
        is_prefill = len(sequence.token_ids) - sequence.num_computed_tokens != 1
        new = self.num_new_tokens(sequence, before) if is_prefill else 1 - before
        length = self._take(sequence, new, max_tokens, is_prefill)
        self.num_scheduled_tokens[sequence] = before + length
        if length == new:
            self._unserved.discard(sequence)
        elif is_prefill and not length and new <= max_tokens:
            self._prefill_waits = True
            self._end_prefills()

    def _take(self, sequence: Sequence, new: int, max_tokens: int, is_prefill: bool) -> int:
        """Take up to `new` tokens of the step for one turn, and return how many."""
        length = min(new, max_tokens, self.tokens_left)
        if is_prefill:
            length = 0 if self._prefill_waits else min(length, self.prefill_tokens_left)
            if not self.limits.chunked_prefill and length < new <= self.limits.max_num_batched_tokens:
                return 0
            self.prefill_tokens_left -= length
            if sequence.num_scored_rows is not None:
                self.scored_tokens_left -= length
            if not self.prefill_tokens_left:
                self._end_prefills()
        self.tokens_left -= length
        return length

    def _give_back(self, sequence: Sequence) -> None:
        """Give back the tokens of a sequence that is not computed in this step."""
        length = self.num_scheduled_tokens.pop(sequence, 0)
        self.tokens_left += length
        if length and sequence not in self.decodes:
            self.prefill_tokens_left += length

    def _end_prefills(self) -> None:
        """Mark that running prefills take no more tokens."""
        self._unserved.difference_update(self.prefills)
        for sequence in self.prefills:
            self.num_scheduled_tokens.setdefault(sequence, 0)

    def _admit(self, sequence: Sequence, max_tokens: int) -> str:
        """Start a waiting sequence with a turn of at most `max_tokens` tokens; if it cannot start, return the
        reason.
        """
        if reason := self._blocked_by(sequence):
            return reason
        match, saved = self.views.prefix_match(sequence), sequence.swapped
        if saved is not None:
            new = self._num_new_tokens(sequence, saved.num_computed_tokens, saved.num_evicted_tokens)
        else:
            new = self._num_new_tokens(sequence, sequence.num_computed_tokens or match.num_tokens, 0)
        length = self._take(sequence, new, max_tokens, is_prefill=True)
        if new and not length:
            left = min(max_tokens, self.tokens_left, self.prefill_tokens_left)
            cut = "" if self.limits.chunked_prefill else ", and chunked_prefill is off"
            return f"{new} tokens to compute, {left} of this step for it{cut}"
        self.decisions.append(RequestDecision(sequence.request_id, "admitted", self._start(sequence, match)))
        self.queue.remove(sequence)
        sequence.scheduled_step = self.step
        bisect.insort(self.running, sequence, key=lambda running: running.arrival_index)
        self.views.num_admitted += 1
        self.free_slots -= 1 + len(sequence.children)
        self.num_scheduled_tokens[sequence] = length
        if length < new and self.prefill_tokens_left:
            self.prefills = [*self.prefills, sequence]  # a copy: the policy's views keep the old list
            self._unserved.add(sequence)
        return ""

    def _blocked_by(self, sequence: Sequence) -> str:
        """Return why `sequence` cannot start now, or an empty string; shared pages of waiting sequences are freed for
        it.
        """
        limits, manager = self.limits, self.kv_cache_manager
        slots = 1 + len(sequence.children) if sequence.beams else 1
        if self.free_slots < slots:
            num_joining = _num_joining(self.running)
            joining = f" and {num_joining} are to join them" if num_joining else ""
            beams = f", {slots} beams would come" if slots > 1 else ""
            return f"{len(self.running)} sequences run{joining}{beams}, max_num_seqs is {limits.max_num_seqs}"
        if self.tokens_left <= 0:
            return f"the step's {limits.max_num_batched_tokens} tokens are taken"
        if self.prefill_tokens_left <= 0:
            return f"the step's {limits.max_chunk_tokens} prefill tokens are taken"
        while True:
            match = self.views.prefix_match(sequence)
            needed = self.views.pages_to_start(sequence, match)
            counts = [pages + reserved for pages, reserved in zip(needed, self.reserved_pages, strict=True)]
            short = manager.first_exhausted_group(counts, match)
            if short is None:
                return ""
            free = manager.num_available(short, match) - self.reserved_pages[short]
            reason = f"{needed[short]} pages needed, {max(0, free)} free"
            if not self.reclaim_shared_pages(f"not admitted: {reason}", but=sequence):
                return reason

    def num_new_tokens(self, sequence: Sequence, num_scheduled_tokens: int = 0) -> int:
        """Return how many further tokens a running sequence may compute in this step, up to the point where its next
        child starts or its budget ends.
        """
        computed, evicted = sequence.num_computed_tokens, sequence.num_evicted_tokens
        return self._num_new_tokens(sequence, computed, evicted, num_scheduled_tokens)

    def _num_new_tokens(self, sequence: Sequence, computed: int, evicted: int, scheduled: int = 0) -> int:
        new = self.kv_cache_manager.num_new_tokens(sequence, computed, evicted)
        shared = sequence.num_shared_by_children if sequence.children else None
        if shared is not None:
            new = max(0, min(new, shared - computed))
        new -= scheduled
        if sequence.num_scored_rows is not None and new > self.scored_tokens_left:
            new = self.scored_tokens_left if self.limits.chunked_prefill else 0
        return new

    def _find(self, request: object, entry: str) -> Sequence | None:
        """Return the sequence of a request in a policy's order; None if there is none, or if it gets no turn."""
        if not isinstance(request, RequestView) or not isinstance(request.request_id, str):
            self._refuse("", f"{entry} is {request!r}, must be a request of the state")
        elif request.request_id not in self._without_turn:
            if (sequence := self.queue.by_id.get(request.request_id)) is not None:
                return sequence
            self._refuse(request.request_id, f"{entry} is for {request.request_id!r}, which neither runs nor waits")
        return None

    def _refuse(self, request_id: str, reason: str) -> None:
        self.decisions.append(RequestDecision(request_id, "refused_decision", f"policy {self.policy}: {reason}"))

    def _fail(self, sequence: Sequence, error: str) -> None:
        """Fail a sequence and its beams; they do not take part in this step."""
        for each in sequence.beams or [sequence]:
            self._without_turn.add(each.request_id)
            self._unserved.discard(each)
            self._give_back(each)
            self.errors.append((each, error))

    def _preempt_all(self, requests: Iterable[Any]) -> None:
        """Preempt the running sequences in the policy's `preempted`."""
        for place, request in enumerate(requests):
            sequence = self._find(request, f"entry {place} of preempted")
            if sequence is not None and sequence not in self.running:
                self._refuse(sequence.request_id, f"preempts {sequence.request_id}, which does not run")
            elif sequence is not None:
                self.preempted.append(request)
                self._without_turn |= {each.request_id for each in sequence.beams or [sequence]}
                self.preempt(sequence, f"policy {self.policy} preempted it")
        if self._without_turn:
            self._count_running()

    def preempt(self, sequence: Sequence, reason: str) -> None:
        """Preempt `sequence` and its beams: free all their pages and queue them again."""
        self.views.invalidate_matches()
        self.freed_pages = True
        together = sequence.beams or [sequence]
        for each in together:
            self._give_back(each)
            each.num_preemptions += 1  # before it is queued, so that a policy sees it
            if each in self.running:
                self.running.remove(each)
            elif each.parent is None:
                self.queue.remove(each)
        if sequence.beams:
            for each in together:
                self.kv_cache_manager.free(each)  # not swapped out: swap-in would duplicate the pages that beams share
            self.queue.add(*together)
        else:
            saved = self.kv_cache_manager.preempt(sequence)
            reason += f", {saved} pages swapped out to the CPU" if saved else ""
            self.queue.add(sequence, *sequence.children)
        for each in together:
            self.decisions.append(RequestDecision(each.request_id, "preempted", reason))

    def reclaim_shared_pages(self, need: str, but: Sequence | None = None) -> bool:
        """Free the pages of the youngest waiting sequence with shared pages, except `but`; return whether there was
        one.
        """
        holder = self.queue.youngest_page_holder(but)
        if holder is not None:
            self.views.invalidate_matches()
            self.freed_pages = True
            self.kv_cache_manager.free(holder)
            holder.num_preemptions += 1
            self.views.update_waiting(holder)
            self.decisions.append(
                RequestDecision(holder.request_id, "preempted", f"{need}; a waiting request is preempted")
            )
        return holder is not None

    def allocate_pages(self, keep: Iterable[Any] | None = None) -> None:
        """Allocate the pages that scheduled sequences need. If pages run out, preempt the last running sequence in the
        order `keep` (default: order of arrival).
        """
        manager, order, lacks_pages = self.kv_cache_manager, self.running, self.lacks_pages
        if keep is not None and lacks_pages:
            order = self._keep_order(keep)
            self.lacking = [sequence for sequence in order if sequence in self.lacking]
        self.lacking = [sequence for sequence in self.lacking if self.num_scheduled_tokens.get(sequence)]
        while self.lacking:
            sequence = self.lacking[0]
            missing = manager.pages_to_allocate(sequence) if lacks_pages else None
            short = manager.first_exhausted_group(missing) if missing is not None else None
            if missing is None or short is None:
                self.views.invalidate_matches()
                manager.allocate(self.lacking.pop(0))
                continue
            need = f"{sequence.request_id} needs {missing[short]} more pages, {manager.num_available(short)} free"
            if not self.reclaim_shared_pages(need):
                last = order[-1]
                which = "the youngest" if last is self.running[-1] else "the last in order"
                self.preempt(last, f"{need}; {which} is preempted")
                order = [each for each in order if each in self.running]
                self.lacking = [each for each in self.lacking if each in self.running]

    def _keep_order(self, keep: Iterable[Any]) -> list[Sequence]:
        """Return the running sequences in the order of `keep`, then the others."""
        order: dict[Sequence, None] = {}
        for place, request in enumerate(items_of(keep, self.policy, len(self.queue.by_id))):
            sequence = self._find(request, f"entry {place} of keep")
            if sequence is not None and sequence in self.running:
                order[sequence] = None
                self.keep.append(request)
        return list(order | dict.fromkeys(self.running))

    def spans(self) -> tuple[Span, ...]:
        """Return the spans in packing order: those of one token, then longer ones, each in order of arrival."""
        new = tuple.__new__  # skip Span's slow constructor
        num_tokens = self.limits.max_num_batched_tokens - self.tokens_left
        if num_tokens == len(self.running) and self.running == self.decodes:
            return tuple([new(Span, (s, s.num_computed_tokens, 1, True, None, (), ())) for s in self.running])
        single: list[Span] = []
        longer: list[Span] = []
        for sequence in self.running:
            length = self.num_scheduled_tokens.get(sequence, 0)
            if not length:
                continue
            start, known = sequence.num_computed_tokens, len(sequence.token_ids)
            samples = start + length == known
            if samples and length == 1:
                single.append(new(Span, (sequence, start, 1, True, None, (), ())))
                continue
            if not samples and self.num_new_tokens(sequence, length) > 0:
                reason = f"prefill cut: {length} of {known - start} tokens fit into this step"
                self.decisions.append(RequestDecision(sequence.request_id, "cut", reason))
            scored = num_scored_rows(sequence, start, length)
            span = Span(sequence, start, length, samples, scored + samples if scored else None)
            (single if length == 1 else longer).append(span)
        return (*single, *longer)

    def _start(self, sequence: Sequence, match: PrefixMatch) -> str:
        """Allocate the first pages of `sequence`; return the reason to record."""
        manager, pools = self.kv_cache_manager, self.kv_cache_manager.pools
        before = [pool.num_used for pool in pools]
        saved, waited = sequence.swapped, sequence.num_computed_tokens
        sequence.cached_tokens += waited
        sequence.shared_pages += sum(page != NULL_PAGE for pages in sequence.pages for page in pages)
        self.views.invalidate_matches()
        manager.start(sequence, match)
        manager.allocate(sequence)
        taken = " + ".join(str(pool.num_used - used) for pool, used in zip(pools, before, strict=True))
        left = " + ".join(str(pool.num_available) for pool in pools)
        reason = f"admitted: {taken} pages taken, {left} left"
        if saved is not None:
            return f"{reason}; {saved.num_computed_tokens} tokens swapped in from the CPU"
        if waited:
            return f"{reason}; {waited} tokens are in shared pages"
        if match.num_tokens:
            reason += f"; {match.num_tokens} tokens found in the cache, in {match.num_shared_pages} pages"
        return reason


def _num_joining(sequences: list[Sequence]) -> int:
    """Return the number of children that will join running sequences."""
    return sum([len(sequence.children) for sequence in sequences if sequence.children])
