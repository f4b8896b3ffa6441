"""Which tokens the next step computes: continuous batching (Orca), first come first served.

Integers only, so that thousands of histories are tested in a second and the same scheduler drives a real
model or a simulated one.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from workbench.cache.pages import PagePool, pages_for
from workbench.engine.plan import Decision, Span, StepPlan
from workbench.errors import WorkbenchError
from workbench.request import FinishReason, Sequence


class Refusal(WorkbenchError):
    """A request that could never run, with the numbers."""


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int = 16  # sequences that run at once
    max_num_batched_tokens: int = 512  # tokens a step computes at most

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise WorkbenchError("max_num_seqs and max_num_batched_tokens must be at least 1")


class Scheduler:
    """Owns every sequence from submission to its end, and which pages each holds.

        submit -> waiting --admitted--> running --finished--> gone
                     ^                     |
                     +----- set back ------+     (the youngest, when pages run out)

    Both queues are kept in arrival order and every waiting sequence is younger than every running one, so
    the oldest gets on (with the decodes, once its prefill is done) and nobody starves. `plan` hands pages out;
    `commit` moves `computed` forward.
    """

    def __init__(self, pools: tuple[PagePool, ...], limits: Limits, context: int):
        self.pools = pools
        self.limits = limits
        self.context = context
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._steps = 0
        self._told = ("", "")  # who was last told to wait, and why

    @property
    def page_size(self) -> int:
        return self.pools[0].page_size

    @property
    def pages_used(self) -> int:
        return sum(pool.used for pool in self.pools)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queue `sequence`, or refuse it at once when it can never fit."""
        prompt, most = sequence.prompt_length, sequence.request.sampling.max_tokens
        if prompt + 1 > self.context:
            raise Refusal(
                f"request {sequence.request_id}: {prompt} prompt tokens leave no room in a context of "
                f"{self.context}; shorten the prompt or set overflow: cut_oldest"
            )
        # The last token of all is never read back, so its keys and values need no room.
        needed = pages_for(min(prompt + most, self.context) - 1, self.page_size)
        smallest = min(pool.pages for pool in self.pools)
        if needed > smallest:
            raise Refusal(
                f"request {sequence.request_id}: {prompt} prompt tokens and up to {most} more need {needed} "
                f"pages of {self.page_size} tokens, the cache has {smallest}; lower max_tokens or raise cache.pages"
            )
        sequence.pages = tuple([] for _ in self.pools)
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.order)

    def plan(self) -> StepPlan | None:
        """The next step's spans, or None when there is nothing to do. Pages are taken here."""
        decisions: list[Decision] = []
        self._grow(decisions)
        if not any(decision.action == "set_back" for decision in decisions):
            self._admit(decisions)
        spans = self._spans(decisions)
        if not spans:
            return None
        plan = StepPlan(self._steps, spans, tuple(decisions))
        self._steps += 1
        return plan

    def commit(self, plan: StepPlan, chosen: dict[str, int]) -> None:
        """The step was computed; `chosen` gives each sampled sequence its next token."""
        for span in plan.spans:
            if span.sequence.finish_reason is None:
                span.sequence.computed = span.end
                if span.sequence.request_id in chosen:
                    span.sequence.token_ids.append(chosen[span.sequence.request_id])

    def finish(self, sequence: Sequence, reason: FinishReason) -> list[list[int]]:
        """End `sequence`, whether it runs or waits; its pages are free at once. Returns them, by layer group."""
        if sequence.finish_reason is not None:
            return []
        sequence.finish_reason = reason
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        return self._release(sequence)

    def _grow(self, decisions: list[Decision]) -> None:
        """Pages for every running sequence's next token, oldest first; the youngest makes room."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            missing = self._missing(sequence)
            if self._fits(missing):
                self._take(sequence, missing)
                index += 1
                continue
            youngest = self.running.pop()
            free = min(pool.free for pool in self.pools)
            decisions.append(
                Decision(
                    youngest.request_id,
                    "set_back",
                    f"{sequence.request_id} needs {max(missing)} more pages, {free} free; youngest gives way",
                )
            )
            self._release(youngest)
            youngest.computed = 0
            youngest.set_backs += 1
            self.waiting.insert(0, youngest)

    def _admit(self, decisions: list[Decision]) -> None:
        """Waiting sequences in order, each with pages for all its tokens, until one does not fit."""
        budget = self.limits.max_num_batched_tokens - sum(s.waiting_tokens for s in self.running)
        while self.waiting:
            sequence = self.waiting[0]
            missing = self._missing(sequence)
            if len(self.running) >= self.limits.max_num_seqs:
                reason = f"not admitted: {len(self.running)} sequences run, max_num_seqs is {self.limits.max_num_seqs}"
            elif budget <= 0:
                reason = f"not admitted: the step's {self.limits.max_num_batched_tokens} tokens are taken"
            elif not self._fits(missing):
                free = min(pool.free for pool in self.pools)
                reason = f"not admitted: {max(missing)} pages needed, {free} free"
            else:
                self.waiting.pop(0)
                self.running.append(sequence)
                self._take(sequence, missing)
                budget -= sequence.waiting_tokens
                reason = f"admitted: {max(missing)} pages taken, {min(p.free for p in self.pools)} left"
                decisions.append(Decision(sequence.request_id, "admitted", reason))
                continue
            if (sequence.request_id, reason) != self._told:  # not the same words every step
                self._told = (sequence.request_id, reason)
                decisions.append(Decision(sequence.request_id, "waiting", reason))
            return

    def _spans(self, decisions: list[Decision]) -> tuple[Span, ...]:
        """Decodes first, then prefill in order, cut where the step's budget ends."""
        budget = self.limits.max_num_batched_tokens
        spans = []
        for sequence in sorted(self.running, key=lambda s: s.waiting_tokens > 1):  # stable: arrival order within
            length = min(sequence.waiting_tokens, budget)
            if length == 0:
                break
            if length < sequence.waiting_tokens:
                reason = f"prefill cut: {length} of {sequence.waiting_tokens} tokens fit into this step"
                decisions.append(Decision(sequence.request_id, "cut", reason))
            spans.append(Span.of(sequence, length))
            budget -= length
        return tuple(sorted(spans, key=lambda span: span.length > 1))

    def _missing(self, sequence: Sequence) -> list[int]:
        """Pages still needed for all its tokens, by layer group."""
        needed = pages_for(len(sequence.token_ids), self.page_size)
        return [max(0, needed - len(held)) for held in sequence.pages]

    def _fits(self, missing: list[int]) -> bool:
        return all(count <= pool.free for count, pool in zip(missing, self.pools, strict=True))

    def _take(self, sequence: Sequence, missing: list[int]) -> None:
        for held, count, pool in zip(sequence.pages, missing, self.pools, strict=True):
            held.extend(pool.allocate(count))

    def _release(self, sequence: Sequence) -> list[list[int]]:
        freed = [pool.release(held) for held, pool in zip(sequence.pages, self.pools, strict=True)]
        sequence.pages = tuple([] for _ in self.pools)
        return freed
