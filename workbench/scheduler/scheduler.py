"""Schedule the tokens of each step: a policy decides, the scheduler owns sequences and allocates pages.

It works on integers only, so tests cover thousands of histories in a second, and the same scheduler drives a real or a
simulated model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from workbench.errors import WorkbenchError
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import PagePool
from workbench.request import FinishReason, Sequence
from workbench.scheduler.allocate import StepAllocation
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.plan import RequestDecision, Span, StepPlan, add_drafts, check_request_fits, check_still_fits
from workbench.scheduler.policies import Interleaved
from workbench.scheduler.policy import SchedulerDecision, SchedulingPolicy
from workbench.scheduler.prefill_rate import PrefillRate
from workbench.scheduler.queue import SequenceGroups, WaitingQueue
from workbench.scheduler.validate import call_policy, policy_name
from workbench.scheduler.views import RequestViews, TenantCounters

MAX_POLICY_CALLS = 8  # policy calls per step: each further call follows a preemption without progress


class Scheduler:
    """The scheduler: it owns every sequence from submission to its end; `kv_cache_manager` owns the pages.

        submit -> waiting --admitted--> running --finished--> gone
                     ^                     |
                     +----- preempted -----+     (the last to keep its pages, when they run out)

    A sequence may have children, which start from its pages once it has computed their common prefix: samples of one
    prompt, or beams of a preempted search. Children without a slot wait with these pages; the oldest of them holds the
    pages until others need them. Beams of one search are preempted together: a single beam would restart without the
    shared pages, while the others would wait for it and hold theirs.

    Both queues are in order of arrival. The policy is called before every step that needs a decision. Its order is
    served as far as slots, tokens and pages allow (see `StepAllocation`). `plan` allocates pages; `commit` advances
    `num_computed_tokens` and frees pages that no later query reads.
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
        self._steps = 0
        self._prefill_rate = PrefillRate()
        self._decisions: list[RequestDecision] = []  # decisions since the last plan
        self._padded_rows = 0  # padding rows of a padded batch, until its last sequence finishes
        self._last_waiting = ("", "")  # the last recorded waiting request, and the reason
        self.set_policy(policy or Interleaved())

    def set_policy(self, policy: SchedulingPolicy) -> None:
        """Use `policy` from the next step on. Sequences keep their positions, tokens and pages."""
        self.policy, self._policy_name = policy, policy_name(policy)
        self._padded_rows = 0
        self._queue.changed = True

    @property
    def seconds_per_prefill_token(self) -> float:
        """Return the measured seconds per prefill token, decodes of the same steps included; 0 before a measurement."""
        return self._prefill_rate.seconds_per_token

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Use `limits` from the next step on.

        If more sequences run than the new limit allows, they continue, and none is admitted until fewer run.

        Raises:
            WorkbenchError: if a request in progress could never run under them. Then the limits are unchanged.
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
        """Queue a new `sequence`, or refuse it at once if it can never fit.

        Args:
            sequence: the first sequence of a request.
            children: its further samples; they start from its pages at the end of its prefill.
            as_beams: whether the sequences advance together: beams of one search, or a sequence and its second stream.

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
        """Plan the next step and allocate its pages; None if there is no work.

        Args:
            proposed: draft tokens by request id, verified as far as they fit into the step.
            now: time in seconds, for policies with deadlines.

        Raises:
            WorkbenchError: if the policy fails or schedules no request. No token is lost; decisions made before the
                error are reported by the next plan.
        """
        self.kv_cache_manager.transfers_done()
        if self.has_unfinished_requests:
            self._prefill_rate.end_step(now)
        else:  # idle since the last of them ended
            self._prefill_rate.forget_step()
        if self.tenant_counters.returned:
            self.tenant_counters.lift_returned(chain(self.running, self.waiting))
        for sequence in self.running if self.kv_cache_manager.budget is not None else ():
            if reason := self.kv_cache_manager.evict(sequence):
                self._decisions.append(RequestDecision(sequence.request_id, "evicted", reason))
        self.sequence_groups.start_children(self._steps, self._decisions)
        if not self.has_unfinished_requests:
            return None
        policy_decisions: list[SchedulerDecision] = []
        step = self._allocate(policy_decisions, now)
        spans = step.spans()
        if not spans and not step.errors:
            return None
        if proposed:
            spans = add_drafts(spans, proposed, self.kv_cache_manager, self.limits.max_num_batched_tokens)
        if self.kv_cache_manager.recurrent_groups:
            for span in spans:
                self.kv_cache_manager.allocate_snapshots(span.sequence, span.start, span.num_known_tokens)
        moves, padding = self.kv_cache_manager.pop_transfers(), self._padding(spans)
        decisions, errors = tuple(self._decisions), tuple(step.errors)
        plan = StepPlan(self._steps, spans, decisions, moves, errors, padding, tuple(policy_decisions))
        self._decisions.clear()
        self._prefill_rate.begin_step(now, step.num_prefill_tokens)
        self._steps += 1
        return plan

    def commit(
        self, plan: StepPlan, sampled: Mapping[str, int], accepted_drafts: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Update sequences after a step was computed.

        Args:
            plan: the computed plan.
            sampled: the next token of each sampled sequence, by request id.
            accepted_drafts: number of accepted draft tokens by request id. Other draft tokens are dropped and their
                pages freed.
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
        """Exclude the last planned step from the measured time per prefill token, because part of its time was other
        work (for example a compilation).
        """
        self._prefill_rate.forget_step()

    def skip_steps(self, steps: int) -> None:
        """Count `steps` further steps that repeated the last plan."""
        self._steps += steps

    def finish(self, sequence: Sequence, reason: FinishReason) -> list[list[int]]:
        """End `sequence`, running or waiting; return the freed pages by cache group."""
        if sequence.finish_reason is not None:
            return []
        sequence.finish_reason = reason
        self._decisions[:] = [each for each in self._decisions if each.request_id != sequence.request_id]
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

    def _allocate(self, policy_decisions: list[SchedulerDecision], now: float) -> StepAllocation:
        """Allocate the next step in the policy's order."""
        manager, limits, views, queue = self.kv_cache_manager, self.limits, self._views, self._queue
        name = self._policy_name
        for _ in range(MAX_POLICY_CALLS):
            step = StepAllocation(manager, limits, views, self.running, queue, self._decisions, self._steps, name)
            if self._has_nothing_to_decide(step):
                step.serve_running(step.decodes)
                step.allocate_pages()
                return step
            running = self.running, step.decodes, step.prefills
            rate = self.seconds_per_prefill_token
            state = views.state(self._steps, running, step.reserved_pages, queue.by_id, now, rate)
            decision = call_policy(self.policy, state)
            step.serve(decision)
            step.allocate_pages(decision.keep)
            policy_decisions.append(SchedulerDecision(step.items, step.keep, step.preempted, decision.reasons))
            queue.changed = False
            # A starting parent may have no token to compute before its prompt's last token.
            if joined := self.sequence_groups.start_children(self._steps, self._decisions):
                step.reserve([sequence for sequence in joined if sequence in self.running])
                step.serve_running(step.lacking)
                step.allocate_pages()
            self._note_waiting(step)
            advances = any(step.num_scheduled_tokens.values())
            if advances or step.errors or self.running and not any(map(step.num_new_tokens, self.running)):
                return step
            if not step.freed_pages:
                break
        reasons = [f"{each.request_id}: {each.reason}" if each.request_id else each.reason for each in self._decisions]
        self._decisions[:] = [each for each in self._decisions if each.action == "preempted"]
        raise WorkbenchError(
            f"policy {name}: plans nothing, with {len(self.running)} sequences that run and {len(self.waiting)} that "
            "wait; it must schedule a request" + "".join(f"; {each}" for each in reasons[:3])
        )

    @property
    def lets_all_decode(self) -> bool:
        """Return whether the next step needs no decision if all running sequences decode and have pages: the policy is
        steady, and no request can start.
        """
        is_full = len(self.running) >= self.limits.max_num_seqs and not self._queue.changed
        return getattr(self.policy, "steady", False) and (is_full or not self.waiting)

    def _has_nothing_to_decide(self, step: StepAllocation) -> bool:
        """Return whether all running sequences decode in this step under any order of the policy."""
        fit = len(step.decodes) == len(self.running) <= self.limits.max_num_batched_tokens
        return fit and self.lets_all_decode and not step.lacks_pages

    def _note_waiting(self, step: StepAllocation) -> None:
        """Record why the next waiting sequence cannot start, unless the last record says the same."""
        if step.waiting is not None and step.waiting != self._last_waiting:
            self._last_waiting = step.waiting
            self._decisions.append(RequestDecision(step.waiting[0], "waiting", step.waiting[1]))

    def _padding(self, spans: tuple[Span, ...]) -> int:
        if not getattr(self.policy, "padded", False):
            return 0
        self._padded_rows = max(self._padded_rows, len(self.running))
        return self._padded_rows - len(spans) if all(span.length == 1 for span in spans) else 0
