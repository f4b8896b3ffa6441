"""Schedule the tokens of each step: a policy decides, the scheduler owns sequences and allocates pages.

Integers only, so that thousands of histories are tested in a second and the same scheduler drives a real model or a
simulated one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain

from workbench.errors import WorkbenchError
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import PagePool
from workbench.request import FinishReason, Sequence
from workbench.scheduler.allocate import StepAllocation
from workbench.scheduler.plan import (
    RequestDecision,
    SchedulerLimits,
    Span,
    StepPlan,
    add_drafts,
    check_request_fits,
    check_still_fits,
)
from workbench.scheduler.policies import (
    FCFS,
    BuiltInPolicy,
    Deadline,
    DecodeFirst,
    Fair,
    Interleaved,
    PrefillFirst,
    Priority,
    ShortestPrompt,
)
from workbench.scheduler.policy import SchedulerDecision, SchedulerState, SchedulingPolicy
from workbench.scheduler.prefill_rate import PrefillRate
from workbench.scheduler.queue import SequenceGroups, WaitingQueue
from workbench.scheduler.validate import ValidatedDecision, call_policy, policy_name, validate_decision
from workbench.scheduler.views import RequestViews, TenantCounters

MAX_POLICY_CALLS = 8  # per step: each further call follows a preemption without progress

IN_PARTS = (Interleaved, FCFS, PrefillFirst, DecodeFirst, ShortestPrompt, Priority, Fair, Deadline)


class Scheduler:
    """The owner of every sequence from submission to its end; `kv_cache_manager` knows its pages.

        submit -> waiting --admitted--> running --finished--> gone
                     ^                     |
                     +----- preempted -----+     (the last in the policy's order, when pages run out)

    A sequence may have children, which start on its pages once it has computed their common prefix: samples of one
    prompt, or beams of a preempted search. Children without a slot wait on these pages, which the oldest of them holds
    until they are needed more. Beams of one search are preempted together: a single one would come back without the
    pages that they share, and the others would wait for it on theirs.

    Both queues are in order of arrival. The policy is called before every step with something to decide. Its decision
    is carried out as far as slots, tokens and pages allow. `plan` allocates pages; `commit` advances
    `num_computed_tokens` and frees pages that no query reaches any more.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        limits: SchedulerLimits,
        max_model_len: int,
        policy: SchedulingPolicy | None = None,
    ):
        self.kv_cache_manager = kv_cache_manager
        self.limits = limits
        self.max_model_len = max_model_len
        self.running: list[Sequence] = []
        self.tenant_counters = TenantCounters()
        self._views = RequestViews(kv_cache_manager, limits, self.tenant_counters)
        self._queue = WaitingQueue(kv_cache_manager.pools, self._views)
        self.sequence_groups = SequenceGroups(kv_cache_manager, limits, self.running, self._queue)
        self._steps, self._now = 0, 0.0
        self._prefill_rate = PrefillRate()
        self._padded_rows = 0  # rows of a padded batch, until its last sequence finishes
        self._last_waiting = ("", "")  # the last recorded waiting request, and the reason
        self._named: list[Sequence] = []  # running sequences when `_one_each` was made
        self._late = False  # whether the oldest of them was starving then
        self._one_each: tuple[tuple[str, int], ...] = ()
        self.set_policy(policy or Interleaved())

    def set_policy(self, policy: SchedulingPolicy) -> None:
        """Decide by `policy` from the next step on. Sequences keep their places, tokens and pages."""
        self.policy = policy
        self._named, self._padded_rows = [], 0  # of the policy before
        self._queue.changed = True
        # A subclass of a built-in policy may decide anything, so it is called.
        self._in_parts = policy if isinstance(policy, BuiltInPolicy) and type(policy) in IN_PARTS else None

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Plan by `limits` from the next step on.

        Where more sequences run than may now, they run on, and none is admitted until fewer do.

        Raises:
            WorkbenchError: if a request in progress could never run under them. Nothing has changed then.
        """
        for sequence in chain(self.running, self.waiting):
            check_still_fits(sequence, self.kv_cache_manager, limits, self.max_model_len)
        self.limits = self._views.limits = limits
        self.sequence_groups.set_limits(limits)
        self._queue.changed = True

    @property
    def waiting(self) -> list[Sequence]:
        return self._queue.sequences

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return self.kv_cache_manager.pools

    @property
    def pages_in_use(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def next_step(self) -> int:
        """Return the number of the next step."""
        return self._steps

    def submit(self, sequence: Sequence, children: Iterable[Sequence] = (), as_beams: bool = False) -> None:
        """Queue `sequence`, or refuse it at once if it can never fit.

        Args:
            sequence: the first sequence of a request.
            children: its further samples; they start on its pages where its prefill ends.
            as_beams: whether they are beams of one search, or a sequence and its second stream: these advance together.

        Raises:
            RequestRefused: if it can never run.
        """
        group = [sequence, *children]
        if not self.has_unfinished_requests:
            self._last_waiting = ("", "")
            self._prefill_rate.forget_step()  # idle since
        second = next((each for each in group[1:] if each.own_prompt), None)
        num_beams = len(group) if as_beams and second is None else 0
        check_request_fits(sequence, self.kv_cache_manager, self.limits, self.max_model_len, num_beams, second)
        for new in group:
            new.arrival_step, new.beams = self._steps, group if as_beams else []
            self.tenant_counters.add(new.request.tenant)
        alone = (
            self.kv_cache_manager.budget is not None
        )  # eviction moves tokens within pages, which then cannot be shared
        for parent, *rest in [[each] for each in group] if alone else [group]:
            self._queue.add(parent, *rest)

    def plan(self, proposed: Mapping[str, tuple[int, ...]] | None = None, now: float = 0.0) -> StepPlan | None:
        """Plan the next step and allocate its pages; None if there is nothing to do.

        Args:
            proposed: draft tokens by request id; they are verified as far as the step has room.
            now: seconds, for policies that know deadlines.

        Raises:
            WorkbenchError: if the policy returns no plan; all sequences are unchanged then.
        """
        self.kv_cache_manager.transfers_done()
        self._now = now
        if self.has_unfinished_requests:
            self._prefill_rate.end_step(now)
        else:  # idle since the last of them ended
            self._prefill_rate.forget_step()
        if self.tenant_counters.returned:
            self.tenant_counters.lift_returned(chain(self.running, self.waiting))
        decisions: list[RequestDecision] = []
        for sequence in self.running if self.kv_cache_manager.budget is not None else ():
            if reason := self.kv_cache_manager.evict(sequence):
                decisions.append(RequestDecision(sequence.request_id, "evicted", reason))
        self.sequence_groups.start_children(self._steps, decisions)
        policy_decisions: list[SchedulerDecision] = []
        spans, errors, prefill_tokens = self._steady_decode(decisions, policy_decisions), (), 0
        if spans is None:
            spans, errors = self._decide(decisions, policy_decisions)
            prefill_tokens = sum([span.length for span in spans if not span.is_decode])
        if not spans and not errors:
            return None
        if proposed:
            spans = add_drafts(spans, proposed, self.kv_cache_manager, self.limits.max_num_batched_tokens)
        if self.kv_cache_manager.recurrent_groups:
            for span in spans:
                self.kv_cache_manager.allocate_snapshots(span.sequence, span.start, span.num_known_tokens)
        moves, padding = self.kv_cache_manager.pop_transfers(), self._padding(spans)
        plan = StepPlan(self._steps, spans, tuple(decisions), moves, errors, padding, tuple(policy_decisions))
        self._prefill_rate.begin_step(now, prefill_tokens)
        self._steps += 1
        return plan

    def commit(
        self, plan: StepPlan, sampled: Mapping[str, int], accepted_drafts: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Update sequences after a step was computed.

        Args:
            plan: the computed plan.
            sampled: the next token of each sampled sequence, by request id.
            accepted_drafts: accepted draft tokens, by request id. The others are dropped and their pages freed.
        """
        for span in plan.spans:
            sequence = span.sequence
            if sequence.finish_reason is None:
                accepted = accepted_drafts.get(sequence.request_id, ()) if accepted_drafts else ()
                sequence.num_computed_tokens = span.num_known_tokens + len(accepted)
                sequence.computed_tokens += span.length
                if sequence.request_id in sampled:
                    sequence.token_ids += [*accepted, sampled[sequence.request_id]]
                if self.kv_cache_manager.recurrent_groups:
                    self.kv_cache_manager.commit_states(sequence, span.start, span.num_known_tokens, span.end)
                if span.draft_token_ids:
                    self.kv_cache_manager.free_rejected_drafts(sequence)
                self.kv_cache_manager.update_after_step(sequence)

    def ignore_step_time(self) -> None:
        """Leave the step that was planned last out of the seconds that a prefill token takes: part of its time is not
        work on tokens, but a compilation, say."""
        self._prefill_rate.forget_step()

    def skip_steps(self, steps: int) -> None:
        """Count `steps` steps that repeated the last plan and were not planned themselves."""
        self._steps += steps

    def finish(self, sequence: Sequence, reason: FinishReason) -> list[list[int]]:
        """End `sequence`, running or waiting, and return the pages that this freed, by cache group."""
        if sequence.finish_reason is not None:
            return []
        sequence.finish_reason = reason
        self.tenant_counters.remove(sequence)
        if sequence.beams:
            sequence.beams.remove(sequence)
        if sequence.parent is not None:
            self._queue.remove_child(sequence)
            return self.kv_cache_manager.finish(sequence, failed=reason is FinishReason.ERROR)
        self._queue.changed = True
        del self._queue.by_id[sequence.request_id]
        if sequence in self.running:
            self.running.remove(sequence)
            self._padded_rows *= bool(self.running)
        else:
            self._queue.remove(sequence)
        if sequence.children:  # the next sample becomes the parent of the others
            children, sequence.children = sequence.children, []
            self._queue.add(*children)
        return self.kv_cache_manager.finish(sequence, failed=reason is FinishReason.ERROR)

    def _steady_decode(
        self, decisions: list[RequestDecision], policy_decisions: list[SchedulerDecision]
    ) -> tuple[Span, ...] | None:
        """Return the spans of a step in which every request decodes, if the policy would decide so and none can start;
        None otherwise. The result equals that of `_decide`, without a view or a decision for each decoding request."""
        running, manager, limits = self.running, self.kv_cache_manager, self.limits
        if not running or len(running) > limits.max_num_batched_tokens or not getattr(self.policy, "steady", False):
            return None
        asks = bool(self.waiting) and (len(running) < limits.max_num_seqs or self._queue.changed)
        if asks and self._in_parts is None:
            return None
        spans, uncovered, new = [], [], tuple.__new__  # skip Span's own constructor: this runs once per sequence
        for sequence in running:
            known, computed = len(sequence.token_ids), sequence.num_computed_tokens
            if known - computed != 1 or computed < sequence.prompt_length:  # the last token of a prompt is a prefill
                return None
            if known - sequence.num_evicted_tokens > sequence.allocated_until:
                uncovered.append(sequence)
            spans.append(new(Span, (sequence, computed, 1, True, None, (), ())))
        if asks:
            return tuple(spans) if self._none_begins(uncovered, decisions, policy_decisions) else None
        for sequence in uncovered:
            if (missing := manager.pages_to_allocate(sequence)) is not None:
                if manager.first_exhausted_group(missing) is not None:
                    return None
                manager.allocate(sequence)
        return tuple(spans)

    def _none_begins(
        self, uncovered: list[Sequence], decisions: list[RequestDecision], policy_decisions: list[SchedulerDecision]
    ) -> bool:
        """Return whether all running requests can have their pages and the next waiting one cannot start. If so,
        allocate the pages and record why it waits; otherwise change nothing."""
        policy, running, limits = self._in_parts, self.running, self.limits
        if self.kv_cache_manager.budget is not None or len(running) >= limits.max_num_batched_tokens:
            return False
        if policy is None or any([sequence.children for sequence in running]):
            return False
        by_id = self._queue.by_id
        state = self._state(uncovered)
        if min(state.free_pages) < 0:
            return False
        head, because = policy.head(state)
        if head is None or not because and limits.max_num_seqs - len(running) >= head.slots_needed and state.fits(head):
            return False
        named = self._names(policy, state)
        policy_decisions.append(
            SchedulerDecision((*named, (head.request_id, 0)), (), {head.request_id: because} if because else {})
        )
        step = StepAllocation(self.kv_cache_manager, limits, self._views, running, self._queue, decisions)
        step.num_scheduled_tokens = dict.fromkeys(running, 1)
        if len(uncovered) > 1:
            places = {name: place for place, (name, _) in enumerate(named)}
            uncovered.sort(key=lambda sequence: places[sequence.request_id])
        for sequence in uncovered:
            self._views.invalidate_matches()
            self.kv_cache_manager.allocate(sequence)
        self._admit([(by_id[head.request_id], 0)], policy_decisions[-1].reasons, step)
        self._queue.changed = False
        return True

    def _state(self, uncovered: list[Sequence] | None = None) -> SchedulerState:
        rate = self._prefill_rate.seconds_per_token
        return self._views.state(self._steps, self.running, self._queue.by_id, uncovered, self._now, rate)

    def _names(self, policy: BuiltInPolicy, state: SchedulerState) -> tuple[tuple[str, int], ...]:
        """Return (request id, 1) for each running request, in the order in which they keep their pages. It is rebuilt
        only when that order may have changed since the last step (see `BuiltInPolicy.keep`)."""
        late = state.step - self.running[0].arrival_step >= getattr(policy, "starvation_limit", math.inf)
        if self._named != self.running or late != self._late:
            kept = policy.keep(state)
            ids = [each.request_id for each in self.running] if kept is None else [entry.request_id for entry in kept]
            self._named, self._late, self._one_each = [*self.running], late, tuple([(name, 1) for name in ids])
        return self._one_each

    def _padding(self, spans: tuple[Span, ...]) -> int:
        if not getattr(self.policy, "padded", False):
            return 0
        self._padded_rows = max(self._padded_rows, len(self.running))
        return self._padded_rows - len(spans) if all(span.length == 1 for span in spans) else 0

    def _decide(
        self, decisions: list[RequestDecision], policy_decisions: list[SchedulerDecision]
    ) -> tuple[tuple[Span, ...], tuple[tuple[Sequence, str], ...]]:
        """Call the policy and carry out its decision; return the spans, and the sequences to fail with their errors."""
        if not self.has_unfinished_requests:
            return (), ()
        name, by_id = policy_name(self.policy), self._queue.by_id
        step = StepAllocation(self.kv_cache_manager, self.limits, self._views, self.running, self._queue, decisions)
        state = self._state()
        policy_decisions.append(call_policy(self.policy, state))
        found = validate_decision(policy_decisions[-1], state, by_id, name)
        decisions += found.ignored
        self._carry_out(found, step)
        self._queue.changed = False
        spans = step.spans()
        if spans or found.errors or (state.running and not any(entry.num_new_tokens for entry in state.running)):
            return spans, tuple(found.errors)
        if step.freed_pages and len(policy_decisions) < MAX_POLICY_CALLS:  # a preemption freed pages
            return self._decide(decisions, policy_decisions)
        raise WorkbenchError(
            f"policy {name}: plans nothing, with {len(self.running)} sequences that run and {len(self.waiting)} that "
            "wait; it must schedule a request"
            + "".join(f"; {decision.request_id}: {decision.reason}" for decision in decisions[:3])
        )

    def _carry_out(self, decision: ValidatedDecision, step: StepAllocation) -> None:
        running = set(self.running)
        waiting = [wish for wish in decision.num_scheduled_tokens.items() if wish[0] not in running]
        for sequence in decision.preempted:
            if sequence in self.running:  # not preempted already, with another beam
                step.preempt(sequence, f"policy {policy_name(self.policy)} preempted it")
        if decision.preempted:
            running = set(self.running)
        order = [sequence for sequence in decision.num_scheduled_tokens if sequence in running]
        if len(order) < len(running):
            faulty = {sequence for sequence, _ in decision.errors}
            order += [s for s in self.running if s not in decision.num_scheduled_tokens and s not in faulty]
        step.schedule_all(order, decision.num_scheduled_tokens)
        if step.allocate(order, self._views.may_need_pages):
            self._admit(waiting, decision.reasons, step)
        # A parent that starts may have nothing to compute before its prompt's last token.
        if joined := self.sequence_groups.start_children(self._steps, step.decisions):
            for sequence in joined:
                if sequence in self.running and step.tokens_left > 0:
                    step.schedule(sequence, step.tokens_left)
            step.allocate(self.running)

    def _admit(self, candidates: list[tuple[Sequence, int]], reasons: Mapping[str, str], step: StepAllocation) -> None:
        """Admit waiting sequences in order, each with pages for its next step, until one does not fit."""
        free_slots = self.limits.max_num_seqs - len(self.running) - step.num_joining if candidates else 0
        for sequence, tokens in candidates:
            reason = reasons.get(sequence.request_id, "")
            if reason:
                reason = f"not admitted: {reason}"
            elif tokens:
                reason = step.admit(sequence, tokens, free_slots)
            else:
                reason = step.blocked_by(sequence, free_slots) or "not admitted: the policy gives it no tokens yet"
            if reason:
                if (sequence.request_id, reason) != self._last_waiting:  # not the same reason every step
                    self._last_waiting = (sequence.request_id, reason)
                    step.decisions.append(RequestDecision(sequence.request_id, "waiting", reason))
                return
            self._queue.remove(sequence)
            sequence.scheduled_step = self._steps
            self._views.num_admitted += 1
            free_slots -= 1 + len(sequence.children)
