"""Carry out a policy's decision: preempt, allocate pages, admit, and record the reasons."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping

from workbench.cache.holdings import Holdings
from workbench.cache.pages import NULL_PAGE
from workbench.cache.prefix import Offer
from workbench.engine.limits import Limits
from workbench.engine.plan import Decision
from workbench.engine.queue import Queue
from workbench.engine.views import Views
from workbench.request import Sequence


class Granting:
    """The allocation of one step: tokens per sequence, and pages for them."""

    def __init__(
        self,
        holdings: Holdings,
        limits: Limits,
        views: Views,
        running: list[Sequence],
        queue: Queue,
        decisions: list[Decision],
    ):
        self.holdings, self.limits, self.views = holdings, limits, views
        self.running, self.decisions = running, decisions
        self.lengths: dict[Sequence, int] = {}
        self.queue = queue
        self.freed = False  # a preemption freed pages

    @property
    def left(self) -> int:
        return self.limits.max_num_batched_tokens - sum(self.lengths.values())

    @property
    def joining(self) -> int:
        """Return the number of children that are to join the running sequences."""
        return sum([len(sequence.followers) for sequence in self.running if sequence.followers])

    @property
    def chunk_left(self) -> int:
        """Return the prefill tokens that this step may still compute."""
        return self.limits.chunk - sum(n for s, n in self.lengths.items() if n > 1 or s.waiting_tokens > 1)

    def set_back(self, sequence: Sequence, reason: str) -> None:
        """Preempt `sequence` and its beams: free all their pages and queue them again."""
        self.views.forget_offers()
        self.freed = True
        together = sequence.mates or [sequence]
        for each in together:
            self.lengths.pop(each, None)
            each.set_backs += 1  # before it is queued, so that a policy sees it
            if each in self.running:
                self.running.remove(each)
            elif each.leader is None:
                self.queue.remove(each)
        if sequence.mates:
            for each in together:
                self.holdings.release(each)  # not swapped out: each beam would bring back pages of its own
            self.queue.add(*together)
        else:
            saved = self.holdings.set_back(sequence)
            reason += f", {saved} pages saved on the host" if saved else ""
            self.queue.add(sequence, *sequence.followers)
        for each in together:
            self.decisions.append(Decision(each.request_id, "set_back", reason))

    def unshare(self, need: str, but: Sequence | None = None) -> bool:
        """Free the pages of the youngest waiting sequence that holds shared ones; return whether there was one."""
        holder = self.queue.youngest_holder(but)
        if holder is not None:
            self.views.forget_offers()
            self.freed = True
            self.holdings.release(holder)
            holder.set_backs += 1
            self.views.changed(holder)
            self.decisions.append(Decision(holder.request_id, "set_back", f"{need}; who waits gives way"))
        return holder is not None

    def grow(self, order: list[Sequence], lack: Collection[Sequence] | None = None) -> bool:
        """Allocate pages for the scheduled sequences of `order`; preempt the last in it when pages run out. Return True
        if none was."""
        holdings, order, index, roomy = self.holdings, list(order), 0, True
        may = order if lack is None else [sequence for sequence in order if sequence in lack] if lack else []
        while index < len(may):
            sequence = may[index]
            if len(sequence.token_ids) - sequence.evicted <= sequence.covered or not self.lengths.get(sequence):
                index += 1
                continue
            missing = holdings.missing(sequence)
            short = holdings.short(missing) if missing is not None else None
            if missing is None or short is None:
                self.views.forget_offers()
                holdings.take(sequence)
                index += 1
                continue
            need = f"{sequence.request_id} needs {missing[short]} more pages, {holdings.available(short)} free"
            if not self.unshare(need):
                last, roomy = order[-1], False
                which = "the youngest" if last is self.running[-1] else "the last in turn"
                self.set_back(last, f"{need}; {which} gives way")
                order = [each for each in order if each in self.running]
                may = [each for each in may if each in self.running]
                index = 0  # beams of the last may have been before this one
        return roomy

    def admit(self, sequence: Sequence, tokens: int, places: int) -> str:
        """Start `sequence` with up to `tokens` tokens, or return the reason why it cannot start."""
        obstacle = self.obstacle(sequence, places)
        if obstacle:
            return obstacle
        offer = self.views.offer(sequence)
        saved = sequence.saved
        computed, evicted = (saved.computed, saved.evicted) if saved is not None else (sequence.computed, 0)
        todo = self._todo(sequence, computed or offer.tokens, evicted)
        length = self._portion(min(tokens, todo), todo) if todo else 0
        if todo and not length:
            cut = "" if self.limits.chunked_prefill else ", and chunked_prefill is off"
            return f"not admitted: {todo} tokens to compute, {min(tokens, self.chunk_left)} of this step for it{cut}"
        self.decisions.append(Decision(sequence.request_id, "admitted", self._begin(sequence, offer)))
        bisect.insort(self.running, sequence, key=lambda running: running.order)
        self.lengths[sequence] = length
        return ""

    def give_all(self, order: list[Sequence], tokens: Mapping[Sequence, int]) -> None:
        """Schedule `tokens` for the sequences of `order`, as `schedule` does."""
        lengths, wished = self.lengths, tokens.get
        decodes = 0 if self.freed else self.views.decode  # counted before any preemption
        if len(order) == len(self.running) == decodes and set(map(wished, order)) == {1}:
            lengths.update(dict.fromkeys(order, 1))
            return
        for sequence in order:
            if count := wished(sequence):
                if len(sequence.token_ids) - sequence.computed == 1:
                    lengths[sequence] = 1
                else:
                    self.give(sequence, count)

    def give(self, sequence: Sequence, tokens: int) -> None:
        """Schedule `tokens` for a running sequence, at most what it has to compute."""
        todo = len(sequence.token_ids) - sequence.computed
        if todo > 1:
            todo = self.todo(sequence)
            todo = self._portion(min(tokens, todo), todo)
        self.lengths[sequence] = todo

    def obstacle(self, sequence: Sequence, places: int) -> str:
        """Return why `sequence` cannot start now, or an empty string; waiting holders of shared pages give them up for
        it."""
        limits = self.limits
        wanted = 1 + len(sequence.followers) if sequence.mates else 1
        if places < wanted:
            come = self.joining
            run = f"{len(self.running)} sequences run" + (f" and {come} are to join them" if come else "")
            beams = f", {wanted} beams would come" if wanted > 1 else ""
            return f"not admitted: {run}{beams}, max_num_seqs is {limits.max_num_seqs}"
        if self.left <= 0:
            return f"not admitted: the step's {limits.max_num_batched_tokens} tokens are taken"
        while True:
            offer = self.views.offer(sequence)
            lacks = self.views.lacks(sequence, offer)
            short = self.holdings.short(lacks, offer)
            if short is None:
                return ""
            reason = f"not admitted: {lacks[short]} pages needed, {self.holdings.available(short, offer)} free"
            if not self.unshare(reason, but=sequence):
                return reason

    def todo(self, sequence: Sequence) -> int:
        """Return the tokens that a running sequence may compute now: up to its next child's start, or the end of its
        budget."""
        return self._todo(sequence, sequence.computed, sequence.evicted)

    def _todo(self, sequence: Sequence, computed: int, evicted: int) -> int:
        todo = self.holdings.next_tokens(sequence, computed, evicted)
        if not sequence.followers:
            return todo
        return max(0, min(todo, min(follower.joins for follower in sequence.followers) - computed))

    def _portion(self, length: int, todo: int) -> int:
        """Return the part of `length` that fits into a chunk; 0 if that would cut a prefill that must stay whole."""
        length = max(0, min(length, self.chunk_left))
        cut = length < todo <= self.limits.max_num_batched_tokens
        return 0 if cut and not self.limits.chunked_prefill else length

    def _begin(self, sequence: Sequence, offer: Offer) -> str:
        """Allocate the pages that `sequence` starts with; return the reason to record."""
        holdings, pools = self.holdings, self.holdings.pools
        before = [pool.used for pool in pools]
        saved, waited = sequence.saved, sequence.computed
        sequence.cached_tokens += waited
        sequence.shared_pages += sum(page != NULL_PAGE for pages in sequence.pages for page in pages)
        self.views.forget_offers()
        holdings.begin(sequence, offer)
        holdings.take(sequence)
        taken = " + ".join(str(pool.used - used) for pool, used in zip(pools, before, strict=True))
        left = " + ".join(str(pool.available) for pool in pools)
        reason = f"admitted: {taken} pages taken, {left} left"
        if saved is not None:
            return f"{reason}; {saved.computed} tokens come back from the host"
        if waited:
            return f"{reason}; {waited} tokens stand in pages that it shares"
        if offer.tokens:
            reason += f"; {offer.tokens} tokens found in the cache, in {offer.shared} pages"
        return reason

