"""Which tokens the next step computes: a policy says what it wishes, the scheduler owns sequences and pages.

Integers only, so that thousands of histories are tested in a second and the same scheduler drives a real
model or a simulated one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping

from workbench.cache.holdings import Holdings
from workbench.cache.pages import PagePool
from workbench.engine.granting import Granting
from workbench.engine.lawful import Lawful, ask, lawful, name_of
from workbench.engine.limits import Limits, Refusal, check_fits
from workbench.engine.plan import Decision, Span, StepPlan
from workbench.engine.policies import FCFS
from workbench.engine.policy import Policy
from workbench.engine.tenants import Tenants
from workbench.engine.views import Views
from workbench.errors import WorkbenchError
from workbench.request import FinishReason, Sequence

__all__ = ["Limits", "Refusal", "Scheduler"]


class Scheduler:
    """Owns every sequence from submission to its end; `holdings` knows which pages each holds.

        submit -> waiting --admitted--> running --finished--> gone
                     ^                     |
                     +----- set back ------+     (the last in turn, when pages run out)

    Both queues are kept in arrival order. The policy is asked before every step in which there is something to decide;
    what it wishes is carried out as far as there are places, tokens and pages. `plan` hands pages out; `commit` moves
    `computed` forward and gives back pages that no query reaches any more.
    """

    def __init__(self, holdings: Holdings, limits: Limits, context: int, policy: Policy | None = None):
        self.holdings = holdings
        self.limits = limits
        self.context = context
        self.policy: Policy = policy or FCFS()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.tenants = Tenants()
        self._views = Views(holdings, limits, self.tenants)
        self._by_id: dict[str, Sequence] = {}
        self._steps = 0
        self._told = ("", "")  # who was last told to wait, and why
        self._settled = False  # who waits was looked at since anybody came or went

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return self.holdings.pools

    @property
    def pages_used(self) -> int:
        return sum(pool.used for pool in self.pools)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, sequence: Sequence, followers: Iterable[Sequence] = ()) -> None:
        """Queue `sequence`, or refuse it at once when it can never fit. `followers` are further samples of its
        request: they begin where its prefill ends, on its pages."""
        check_fits(sequence, self.holdings, self.limits, self.context)
        for follower in followers:
            follower.leader, follower.pages = sequence, tuple([] for _ in self.pools)
            sequence.followers.append(follower)
        for new in (sequence, *sequence.followers):
            new.since = self._steps
            self.tenants.come(new.request.tenant, (*self.running, *self.waiting))
        self._wait(sequence)

    def plan(self) -> StepPlan | None:
        """The next step's spans, or None when there is nothing to do. Pages are taken here. WorkbenchError where the
        policy gives no plan; everybody is then where they were."""
        self.holdings.carried_out()
        decisions: list[Decision] = []
        self._fork(decisions)
        spans, faults = self._steady(), ()
        if spans is None:
            spans, faults = self._decided(decisions)
        if not spans and not faults:
            return None
        plan = StepPlan(self._steps, spans, tuple(decisions), self.holdings.drain(), faults)
        self._steps += 1
        return plan

    def commit(self, plan: StepPlan, chosen: dict[str, int]) -> None:
        """The step was computed; `chosen` gives each sampled sequence its next token."""
        for span in plan.spans:
            sequence = span.sequence
            if sequence.finish_reason is None:
                sequence.computed = span.end
                sequence.computed_tokens += span.length
                if sequence.request_id in chosen:
                    sequence.token_ids.append(chosen[sequence.request_id])
                self.holdings.settle(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> list[list[int]]:
        """End `sequence`, whether it runs or waits; its pages are free at once. Returns them, by table."""
        if sequence.finish_reason is not None:
            return []
        sequence.finish_reason = reason
        self._settled = False
        self.tenants.go(sequence)
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            if sequence.leader not in self.running:
                self._views.changed(sequence.leader)
            return []
        del self._by_id[sequence.request_id]
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._wait_no_more(sequence)
        if sequence.followers:  # the next sample leads the others
            heir, *rest = sequence.followers
            heir.leader, heir.followers, sequence.followers = None, rest, []
            for follower in rest:
                follower.leader = heir
            self._wait(heir)
        return self.holdings.release(sequence, broken=reason is FinishReason.ERROR)

    def _wait(self, sequence: Sequence) -> None:
        sequence.pages = tuple([] for _ in self.pools)
        bisect.insort(self.waiting, sequence, key=_order)
        self._by_id[sequence.request_id] = sequence
        self._views.waits(sequence)
        self._settled = False

    def _wait_no_more(self, sequence: Sequence) -> None:
        del self.waiting[bisect.bisect_left(self.waiting, sequence.order, key=_order)]
        self._views.waits_no_more(sequence)

    def _steady(self) -> tuple[Span, ...] | None:
        """The step in which everybody decodes, where there is nothing to decide and the policy would say the same."""
        running, holdings, limits = self.running, self.holdings, self.limits
        if not running or len(running) > limits.max_num_batched_tokens or not getattr(self.policy, "steady", False):
            return None
        if self.waiting and (len(running) < limits.max_num_seqs or not self._settled):
            return None
        spans = []
        for sequence in running:
            known = len(sequence.token_ids)
            if known - sequence.computed != 1:
                return None
            if known > sequence.covered and (missing := holdings.missing(sequence)) is not None:
                if holdings.short(missing) is not None:
                    return None
                holdings.take(sequence)
            spans.append(Span(sequence, sequence.computed, 1, True))
        return tuple(spans)

    def _decided(self, decisions: list[Decision]) -> tuple[tuple[Span, ...], tuple[tuple[Sequence, str], ...]]:
        """The spans that come of the policy's wishes, and who ends because a wish for it broke a law."""
        if not self.busy:
            return (), ()
        state = self._views.state(self._steps, self.running, self.waiting, self._by_id)
        found = lawful(ask(self.policy, state), state, self._by_id, name_of(self.policy))
        stuck = not self.running or any(entry.todo for entry in state.running)
        decisions += found.strays
        spans = self._carried_out(found, decisions)
        if stuck and not spans and not found.faults and not found.set_back:
            raise WorkbenchError(
                f"policy {name_of(self.policy)}: plans nothing, with {len(self.running)} sequences that run and "
                f"{len(self.waiting)} that wait; it must go on with somebody"
                + "".join(f"; {decision.request_id}: {decision.reason}" for decision in decisions[:3])
            )
        self._settled = True
        return spans, tuple(found.faults)

    def _carried_out(self, found: Lawful, decisions: list[Decision]) -> tuple[Span, ...]:
        step = Granting(self.holdings, self.limits, self._views, self.running, self._wait, decisions)
        ran = set(self.running)
        for sequence in found.set_back:
            step.set_back(sequence, f"policy {name_of(self.policy)} set it back")
        faulty = {sequence for sequence, _ in found.faults}
        order = [s for s in found.tokens if s in ran]
        if len(order) < len(self.running):
            order += [s for s in self.running if s not in found.tokens and s not in faulty]
        for sequence, tokens in found.tokens.items():
            if tokens and sequence in ran:
                step.give(sequence, tokens)
        if step.grow(order):
            self._admit([wish for wish in found.tokens.items() if wish[0] not in ran], found.because, step)
        if forked := self._fork(decisions):  # a leader with nothing before its prompt's last token
            for sequence in forked:
                if sequence in self.running and step.left > 0:
                    step.lengths[sequence] = 1
            step.grow(self.running)
        return self._spans(step.lengths, decisions)

    def _admit(self, wishes: list[tuple[Sequence, int]], because: Mapping[str, str], step: Granting) -> None:
        """Waiting sequences in the order of the wishes, each with pages for its next step, until one does not fit."""
        places = self.limits.max_num_seqs - sum(1 + len(s.followers) for s in self.running)
        for sequence, tokens in wishes:
            reason = because.get(sequence.request_id, "")
            if reason:
                reason = f"not admitted: {reason}"
            elif tokens:
                reason = step.admit(sequence, tokens, places)
            else:
                offer = self._views.offer(sequence) if places > 0 and step.left > 0 else None
                reason = step.obstacle(sequence, places, offer) or "not admitted: the policy gives it no tokens yet"
            if reason:
                if (sequence.request_id, reason) != self._told:  # not the same words every step
                    self._told = (sequence.request_id, reason)
                    step.decisions.append(Decision(sequence.request_id, "waiting", reason))
                return
            self._wait_no_more(sequence)
            sequence.began = self._steps
            places -= 1 + len(sequence.followers)

    def _fork(self, decisions: list[Decision]) -> list[Sequence]:
        """Followers join where their leader has computed all of the prompt but its last token; they, and leaders."""
        leaders = [s for s in self.running if s.followers and s.waiting_tokens == 1]
        forked = list(leaders)
        for leader in leaders:
            for follower in leader.followers:
                follower.leader = None
                forked.append(follower)
                if len(self.running) >= self.limits.max_num_seqs:
                    self._wait(follower)
                    continue
                self.holdings.fork(leader, follower)
                self._by_id[follower.request_id] = follower
                follower.began = self._steps
                bisect.insort(self.running, follower, key=_order)
                reason = f"admitted: shares {follower.shared_pages} pages with {leader.request_id}"
                decisions.append(Decision(follower.request_id, "admitted", reason))
            leader.followers = []
        return forked

    def _spans(self, lengths: dict[Sequence, int], decisions: list[Decision]) -> tuple[Span, ...]:
        """Spans of one token first, as they are packed, then the longer ones, each in order of arrival."""
        single: list[Span] = []
        longer: list[Span] = []
        for sequence in self.running:
            length = lengths.get(sequence, 0)
            if not length:
                continue
            todo = len(sequence.token_ids) - sequence.computed
            if length < todo - bool(sequence.followers):
                reason = f"prefill cut: {length} of {todo} tokens fit into this step"
                decisions.append(Decision(sequence.request_id, "cut", reason))
            (single if length == 1 else longer).append(Span(sequence, sequence.computed, length, length == todo))
        return (*single, *longer)


def _order(sequence: Sequence) -> int:
    return sequence.order
