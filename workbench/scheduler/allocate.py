"""Carry out a policy's decision: preempt, allocate pages, admit, and record the reasons."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.prefix import PrefixMatch
from workbench.request import Sequence
from workbench.scheduler.plan import MAX_SCORED_TOKENS, RequestDecision, SchedulerLimits, Span, num_scored_rows
from workbench.scheduler.queue import WaitingQueue
from workbench.scheduler.views import RequestViews


class StepAllocation:
    """The allocation of one step: tokens per sequence, and pages for them."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        limits: SchedulerLimits,
        views: RequestViews,
        running: list[Sequence],
        queue: WaitingQueue,
        decisions: list[RequestDecision],
    ):
        self.kv_cache_manager, self.limits, self.views = kv_cache_manager, limits, views
        self.running, self.decisions = running, decisions
        self.num_scheduled_tokens: dict[Sequence, int] = {}
        self.queue = queue
        self.freed_pages = False  # a preemption freed pages

    @property
    def tokens_left(self) -> int:
        return self.limits.max_num_batched_tokens - sum(self.num_scheduled_tokens.values())

    @property
    def num_joining(self) -> int:
        """Return the number of children that are to join the running sequences."""
        return sum([len(sequence.children) for sequence in self.running if sequence.children])

    @property
    def prefill_tokens_left(self) -> int:
        """Return the prefill tokens that this step may still compute."""
        return self.limits.max_prefill_tokens - sum(
            n for s, n in self.num_scheduled_tokens.items() if n > 1 or s.num_uncomputed_tokens > 1
        )

    def preempt(self, sequence: Sequence, reason: str) -> None:
        """Preempt `sequence` and its beams: free all their pages and queue them again."""
        self.views.invalidate_matches()
        self.freed_pages = True
        together = sequence.beams or [sequence]
        for each in together:
            self.num_scheduled_tokens.pop(each, None)
            each.num_preemptions += 1  # before it is queued, so that a policy sees it
            if each in self.running:
                self.running.remove(each)
            elif each.parent is None:
                self.queue.remove(each)
        if sequence.beams:
            for each in together:
                self.kv_cache_manager.free(each)  # not swapped out: each beam would bring back pages of its own
            self.queue.add(*together)
        else:
            saved = self.kv_cache_manager.preempt(sequence)
            reason += f", {saved} pages swapped out to the CPU" if saved else ""
            self.queue.add(sequence, *sequence.children)
        for each in together:
            self.decisions.append(RequestDecision(each.request_id, "preempted", reason))

    def reclaim_shared_pages(self, need: str, but: Sequence | None = None) -> bool:
        """Free the pages of the youngest waiting sequence that holds shared ones, except `but`; return whether there
        was one."""
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

    def allocate(self, order: list[Sequence], candidates: Collection[Sequence] | None = None) -> bool:
        """Allocate pages for the scheduled sequences of `order`; preempt the last in it when pages run out. Return True
        if none was preempted."""
        manager, order, index, roomy = self.kv_cache_manager, list(order), 0, True
        may = (
            order
            if candidates is None
            else [sequence for sequence in order if sequence in candidates]
            if candidates
            else []
        )
        while index < len(may):
            sequence = may[index]
            if len(
                sequence.token_ids
            ) - sequence.num_evicted_tokens <= sequence.allocated_until or not self.num_scheduled_tokens.get(sequence):
                index += 1
                continue
            missing = manager.pages_to_allocate(sequence)
            short = manager.first_exhausted_group(missing) if missing is not None else None
            if missing is None or short is None:
                self.views.invalidate_matches()
                manager.allocate(sequence)
                index += 1
                continue
            need = f"{sequence.request_id} needs {missing[short]} more pages, {manager.num_available(short)} free"
            if not self.reclaim_shared_pages(need):
                last, roomy = order[-1], False
                which = "the youngest" if last is self.running[-1] else "the last in order"
                self.preempt(last, f"{need}; {which} is preempted")
                order = [each for each in order if each in self.running]
                may = [each for each in may if each in self.running]
                index = 0  # beams of the preempted sequence may have been before this one
        return roomy

    def admit(self, sequence: Sequence, tokens: int, free_slots: int) -> str:
        """Start `sequence` with up to `tokens` tokens, or return the reason why it cannot start."""
        blocked = self.blocked_by(sequence, free_slots)
        if blocked:
            return blocked
        offer = self.views.prefix_match(sequence)
        saved = sequence.swapped
        computed, evicted = (
            (saved.num_computed_tokens, saved.num_evicted_tokens)
            if saved is not None
            else (sequence.num_computed_tokens, 0)
        )
        todo = self._num_new_tokens(sequence, computed or offer.num_tokens, evicted)
        length = self._chunk_length(min(tokens, todo), todo) if todo else 0
        if todo and not length:
            cut = "" if self.limits.chunked_prefill else ", and chunked_prefill is off"
            return (
                f"not admitted: {todo} tokens to compute, "
                f"{min(tokens, self.prefill_tokens_left)} of this step for it{cut}"
            )
        self.decisions.append(RequestDecision(sequence.request_id, "admitted", self._start(sequence, offer)))
        bisect.insort(self.running, sequence, key=lambda running: running.arrival_index)
        self.num_scheduled_tokens[sequence] = length
        return ""

    def schedule_all(self, order: list[Sequence], tokens: Mapping[Sequence, int]) -> None:
        """Schedule `tokens` for the sequences of `order`, as `schedule` does."""
        lengths, tokens_of = self.num_scheduled_tokens, tokens.get
        decodes = 0 if self.freed_pages else self.views.num_decoding  # counted before any preemption
        if len(order) == len(self.running) == decodes and set(map(tokens_of, order)) == {1}:
            lengths.update(dict.fromkeys(order, 1))
            return
        for sequence in order:
            if count := tokens_of(sequence):
                if len(sequence.token_ids) - sequence.num_computed_tokens == 1:
                    lengths[sequence] = 1
                else:
                    self.schedule(sequence, count)

    def schedule(self, sequence: Sequence, tokens: int) -> None:
        """Schedule `tokens` for a running sequence, at most what it has to compute."""
        todo = len(sequence.token_ids) - sequence.num_computed_tokens
        if todo > 1:
            todo = self.num_new_tokens(sequence)
            todo = self._chunk_length(min(tokens, todo), todo)
        self.num_scheduled_tokens[sequence] = todo

    def spans(self) -> tuple[Span, ...]:
        """Return spans of one token first, as they are packed, then longer ones, each in order of arrival."""
        single: list[Span] = []
        longer: list[Span] = []
        lengths, new = self.num_scheduled_tokens, tuple.__new__
        for sequence in self.running:
            length = lengths.get(sequence, 0)
            if not length:
                continue
            start = sequence.num_computed_tokens
            todo = len(sequence.token_ids) - start
            if length == todo == 1:  # the common case: skip Span's own constructor
                single.append(new(Span, (sequence, start, 1, True, None, (), ())))
                continue
            if length < todo and length < self.num_new_tokens(sequence):
                reason = f"prefill cut: {length} of {todo} tokens fit into this step"
                self.decisions.append(RequestDecision(sequence.request_id, "cut", reason))
            scored = num_scored_rows(sequence, start, length)
            span = Span(sequence, start, length, length == todo, scored + (length == todo) if scored else None)
            (single if length == 1 else longer).append(span)
        return (*single, *longer)

    def blocked_by(self, sequence: Sequence, free_slots: int) -> str:
        """Return why `sequence` cannot start now, or an empty string; waiting holders of shared pages give them up for
        it."""
        limits = self.limits
        wanted = 1 + len(sequence.children) if sequence.beams else 1
        if free_slots < wanted:
            come = self.num_joining
            run = f"{len(self.running)} sequences run" + (f" and {come} are to join them" if come else "")
            beams = f", {wanted} beams would come" if wanted > 1 else ""
            return f"not admitted: {run}{beams}, max_num_seqs is {limits.max_num_seqs}"
        if self.tokens_left <= 0:
            return f"not admitted: the step's {limits.max_num_batched_tokens} tokens are taken"
        while True:
            offer = self.views.prefix_match(sequence)
            lacks = self.views.pages_to_start(sequence, offer)
            short = self.kv_cache_manager.first_exhausted_group(lacks, offer)
            if short is None:
                return ""
            reason = (
                f"not admitted: {lacks[short]} pages needed, {self.kv_cache_manager.num_available(short, offer)} free"
            )
            if not self.reclaim_shared_pages(reason, but=sequence):
                return reason

    def num_new_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that a running sequence may compute now: up to its next child's start, or the end of its
        budget."""
        return self._num_new_tokens(sequence, sequence.num_computed_tokens, sequence.num_evicted_tokens)

    def _num_new_tokens(self, sequence: Sequence, computed: int, evicted: int) -> int:
        todo = self.kv_cache_manager.num_next_tokens(sequence, computed, evicted)
        if sequence.num_scored_rows is not None:
            left = self._num_scored_tokens_left(sequence)
            todo = todo if todo <= left else left if self.limits.chunked_prefill else 0
        shared = sequence.num_shared_by_children if sequence.children else None
        return todo if shared is None else max(0, min(todo, shared - computed))

    def _num_scored_tokens_left(self, but: Sequence) -> int:
        """Return how many tokens of prompts the step may still compute with their logits, besides those of `but`."""
        others = (n for s, n in self.num_scheduled_tokens.items() if s is not but and s.num_scored_rows is not None)
        return max(0, MAX_SCORED_TOKENS - sum(others))

    def _chunk_length(self, length: int, todo: int) -> int:
        """Return the part of `length` that fits into a chunk; 0 if that would cut a prefill that must stay whole."""
        length = max(0, min(length, self.prefill_tokens_left))
        cut = length < todo <= self.limits.max_num_batched_tokens
        return 0 if cut and not self.limits.chunked_prefill else length

    def _start(self, sequence: Sequence, offer: PrefixMatch) -> str:
        """Allocate the pages that `sequence` starts with; return the reason to record."""
        manager, pools = self.kv_cache_manager, self.kv_cache_manager.pools
        before = [pool.num_used for pool in pools]
        saved, waited = sequence.swapped, sequence.num_computed_tokens
        sequence.cached_tokens += waited
        sequence.shared_pages += sum(page != NULL_PAGE for pages in sequence.pages for page in pages)
        self.views.invalidate_matches()
        manager.start(sequence, offer)
        manager.allocate(sequence)
        taken = " + ".join(str(pool.num_used - used) for pool, used in zip(pools, before, strict=True))
        left = " + ".join(str(pool.num_available) for pool in pools)
        reason = f"admitted: {taken} pages taken, {left} left"
        if saved is not None:
            return f"{reason}; {saved.num_computed_tokens} tokens swapped in from the CPU"
        if waited:
            return f"{reason}; {waited} tokens are in shared pages"
        if offer.num_tokens:
            reason += f"; {offer.num_tokens} tokens found in the cache, in {offer.num_shared_pages} pages"
        return reason
