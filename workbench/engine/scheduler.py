"""Schedule the tokens of each step: a policy decides, the scheduler owns sequences and allocates pages.

Integers only, so that thousands of histories are tested in a second and the same scheduler drives a real model or a
simulated one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain

from workbench.cache.holdings import Holdings
from workbench.cache.pages import PagePool
from workbench.engine.families import Families
from workbench.engine.granting import Granting
from workbench.engine.lawful import Lawful, ask, lawful, name_of
from workbench.engine.limits import Limits, Refusal, check_fits
from workbench.engine.plan import Decision, Span, StepPlan
from workbench.engine.policies import FCFS, BuiltIn, DecodeFirst, Fair, PrefillFirst, Priority, ShortestPrompt
from workbench.engine.policy import Policy, State, Wishes
from workbench.engine.queue import Queue
from workbench.engine.tenants import Tenants
from workbench.engine.trials import with_drafts
from workbench.engine.views import Views
from workbench.errors import WorkbenchError
from workbench.request import FinishReason, Sequence

MOST_ASKED = 8  # per step: each further call follows a preemption without progress

IN_PARTS = (FCFS, PrefillFirst, DecodeFirst, ShortestPrompt, Priority, Fair)

__all__ = ["Limits", "Refusal", "Scheduler"]


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

    def __init__(self, holdings: Holdings, limits: Limits, context: int, policy: Policy | None = None):
        self.holdings = holdings
        self.limits = limits
        self.context = context
        self.policy: Policy = policy or FCFS()
        self.running: list[Sequence] = []
        self.tenants = Tenants()
        self._views = Views(holdings, limits, self.tenants)
        self._queue = Queue(holdings.pools, self._views)
        self.families = Families(holdings, limits, self.running, self._queue)
        self._steps = 0
        self._batch = 0  # the rows of a padded batch, until its last has ended
        self._told = ("", "")  # who was last told to wait, and why
        self._named: list[Sequence] = []  # who ran when `_one_each` was made
        self._late = False  # and whether the oldest of them was overdue
        self._one_each: tuple[tuple[str, int], ...] = ()
        # A class that somebody made from one of ours may say anything, and is asked.
        mine = self.policy
        self._in_parts: BuiltIn | None = mine if isinstance(mine, BuiltIn) and type(mine) in IN_PARTS else None

    @property
    def waiting(self) -> list[Sequence]:
        return self._queue.sequences

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return self.holdings.pools

    @property
    def pages_used(self) -> int:
        return sum(pool.used for pool in self.pools)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def steps(self) -> int:
        """Return the number of the next step."""
        return self._steps

    def submit(self, sequence: Sequence, followers: Iterable[Sequence] = (), together: bool = False) -> None:
        """Queue `sequence`, or refuse it at once if it can never fit.

        Args:
            sequence: the first sequence of a request.
            children: its further samples; they start on its pages where its prefill ends.
            as_beams: whether they are beams of one search.

        Raises:
            RequestRefused: if it can never run.
        """
        family = [sequence, *followers]
        if not self.busy:
            self._told = ("", "")
        check_fits(sequence, self.holdings, self.limits, self.context, len(family) if together else 0)
        for new in family:
            new.since, new.mates = self._steps, family if together else []
            self.tenants.come(new.request.tenant)
        alone = self.holdings.budget is not None  # eviction moves tokens within pages, which then cannot be shared
        for leader, *rest in [[each] for each in family] if alone else [family]:
            self._queue.add(leader, *rest)

    def plan(self, proposed: Mapping[str, tuple[int, ...]] | None = None) -> StepPlan | None:
        """Plan the next step and allocate its pages; None if there is nothing to do.

        Args:
            proposed: draft tokens by request id; they are verified as far as the step has room.

        Raises:
            WorkbenchError: if the policy returns no plan; all sequences are unchanged then.
        """
        self.holdings.carried_out()
        self.tenants.settle(chain(self.running, self.waiting))
        decisions: list[Decision] = []
        for sequence in self.running if self.holdings.budget is not None else ():
            if reason := self.holdings.evict(sequence):
                decisions.append(Decision(sequence.request_id, "evicted", reason))
        self.families.join(self._steps, decisions)
        wishes: list[Wishes] = []
        spans, faults = self._steady(decisions, wishes), ()
        if spans is None:
            spans, faults = self._decided(decisions, wishes)
        if not spans and not faults:
            return None
        if proposed:
            spans = with_drafts(spans, proposed, self.holdings, self.limits.max_num_batched_tokens)
        moves, padding = self.holdings.drain(), self._padding(spans)
        plan = StepPlan(self._steps, spans, tuple(decisions), moves, faults, padding, tuple(wishes))
        self._steps += 1
        return plan

    def commit(
        self, plan: StepPlan, chosen: Mapping[str, int], standing: Mapping[str, tuple[int, ...]] | None = None
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
                accepted = standing.get(sequence.request_id, ()) if standing else ()
                sequence.computed = span.end - len(span.drafts) + len(accepted)
                sequence.computed_tokens += span.length
                if sequence.request_id in chosen:
                    sequence.token_ids += [*accepted, chosen[sequence.request_id]]
                if span.drafts:
                    self.holdings.cut(sequence)
                self.holdings.settle(sequence)

    def skip(self, steps: int) -> None:
        """Count `steps` steps that were taken as the last one was planned, without a plan of their own."""
        self._steps += steps

    def finish(self, sequence: Sequence, reason: FinishReason) -> list[list[int]]:
        """End `sequence`, running or waiting, and return the pages that this freed, by cache group."""
        if sequence.finish_reason is not None:
            return []
        sequence.finish_reason = reason
        self.tenants.go(sequence)
        if sequence.mates:
            sequence.mates.remove(sequence)
        if sequence.leader is not None:
            self._queue.lost(sequence)
            return self.holdings.end(sequence, broken=reason is FinishReason.ERROR)
        self._queue.changed = True
        del self._queue.by_id[sequence.request_id]
        if sequence in self.running:
            self.running.remove(sequence)
            self._batch *= bool(self.running)
        else:
            self._queue.remove(sequence)
        if sequence.followers:  # the next sample becomes the parent of the others
            heirs, sequence.followers = sequence.followers, []
            self._queue.add(*heirs)
        return self.holdings.end(sequence, broken=reason is FinishReason.ERROR)

    def _steady(self, decisions: list[Decision], wishes: list[Wishes]) -> tuple[Span, ...] | None:
        """The step in which everybody decodes, where the policy would say so and nobody can begin; None for any other.
        What comes of it is what `_decided` gives, without an entry or a wish of each that decodes."""
        running, holdings, limits = self.running, self.holdings, self.limits
        if not running or len(running) > limits.max_num_batched_tokens or not getattr(self.policy, "steady", False):
            return None
        asks = bool(self.waiting) and (len(running) < limits.max_num_seqs or self._queue.changed)
        if asks and self._in_parts is None:
            return None
        spans, uncovered, new = [], [], tuple.__new__  # without Span's own constructor: there are as many as sequences
        for sequence in running:
            known, computed = len(sequence.token_ids), sequence.computed
            if known - computed != 1:
                return None
            if known - sequence.evicted > sequence.covered:
                uncovered.append(sequence)
            spans.append(new(Span, (sequence, computed, 1, True, None, ())))
        if asks:
            return tuple(spans) if self._nobody_begins(uncovered, decisions, wishes) else None
        for sequence in uncovered:
            if (missing := holdings.missing(sequence)) is not None:
                if holdings.short(missing) is not None:
                    return None
                holdings.take(sequence)
        return tuple(spans)

    def _nobody_begins(
        self, uncovered: list[Sequence], decisions: list[Decision], wishes: list[Wishes]
    ) -> bool:
        """Where everybody decodes, whether all have pages and who is next in line has none: then pages are taken, and
        it is told why it waits. Nothing has happened where this is not so."""
        policy, running, limits = self._in_parts, self.running, self.limits
        if self.holdings.budget is not None or len(running) >= limits.max_num_batched_tokens:
            return False
        if policy is None or any([sequence.followers for sequence in running]):
            return False
        by_id = self._queue.by_id
        state = self._views.state(self._steps, running, by_id, uncovered)
        if min(state.free) < 0:
            return False
        head, because = policy.head(state)
        if head is None or not because and limits.max_num_seqs - len(running) >= head.seats and state.fits(head):
            return False
        named = self._names(policy, state)
        wishes.append(Wishes((*named, (head.id, 0)), (), {head.id: because} if because else {}))
        step = Granting(self.holdings, limits, self._views, running, self._queue, decisions)
        step.lengths = dict.fromkeys(running, 1)
        if len(uncovered) > 1:
            places = {name: place for place, (name, _) in enumerate(named)}
            uncovered.sort(key=lambda sequence: places[sequence.request_id])
        for sequence in uncovered:
            self._views.forget_offers()
            self.holdings.take(sequence)
        self._admit([(by_id[head.id], 0)], wishes[-1].because, step)
        self._queue.changed = False
        return True

    def _names(self, policy: BuiltIn, state: State) -> tuple[tuple[str, int], ...]:
        """A token for each that runs, in the order in which they keep their pages; made anew only where that may be
        another one than at the last step (see `BuiltIn.keep`)."""
        late = state.step - self.running[0].since >= getattr(policy, "patience", math.inf)
        if self._named != self.running or late != self._late:
            kept = policy.keep(state)
            ids = [each.request_id for each in self.running] if kept is None else [entry.id for entry in kept]
            self._named, self._late, self._one_each = [*self.running], late, tuple([(name, 1) for name in ids])
        return self._one_each

    def _padding(self, spans: tuple[Span, ...]) -> int:
        if not getattr(self.policy, "padded", False):
            return 0
        self._batch = max(self._batch, len(self.running))
        return self._batch - len(spans) if all(span.length == 1 for span in spans) else 0

    def _decided(
        self, decisions: list[Decision], wishes: list[Wishes]
    ) -> tuple[tuple[Span, ...], tuple[tuple[Sequence, str], ...]]:
        """Call the policy and carry out its decision; return the spans, and the sequences to fail with their errors."""
        if not self.busy:
            return (), ()
        name, by_id = name_of(self.policy), self._queue.by_id
        step = Granting(self.holdings, self.limits, self._views, self.running, self._queue, decisions)
        state = self._views.state(self._steps, self.running, by_id)
        wishes.append(ask(self.policy, state))
        found = lawful(wishes[-1], state, by_id, name)
        decisions += found.strays
        self._carry_out(found, step)
        self._queue.changed = False
        spans = self._spans(step, decisions)
        if spans or found.faults or (state.running and not any(entry.todo for entry in state.running)):
            return spans, tuple(found.faults)
        if step.freed and len(wishes) < MOST_ASKED:  # a preemption freed pages
            return self._decided(decisions, wishes)
        raise WorkbenchError(
            f"policy {name}: plans nothing, with {len(self.running)} sequences that run and {len(self.waiting)} that "
            "wait; it must go on with somebody"
            + "".join(f"; {decision.request_id}: {decision.reason}" for decision in decisions[:3])
        )

    def _carry_out(self, found: Lawful, step: Granting) -> None:
        running = set(self.running)
        waiting = [wish for wish in found.tokens.items() if wish[0] not in running]
        for sequence in found.set_back:
            if sequence in self.running:  # not preempted already, with another beam
                step.set_back(sequence, f"policy {name_of(self.policy)} set it back")
        if found.set_back:
            running = set(self.running)
        order = [sequence for sequence in found.tokens if sequence in running]
        if len(order) < len(running):
            faulty = {sequence for sequence, _ in found.faults}
            order += [s for s in self.running if s not in found.tokens and s not in faulty]
        step.give_all(order, found.tokens)
        if step.grow(order, self._views.uncovered):
            self._admit(waiting, found.because, step)
        # A parent that starts may have nothing to compute before its prompt's last token.
        if joined := self.families.join(self._steps, step.decisions):
            for sequence in joined:
                if sequence in self.running and step.left > 0:
                    step.give(sequence, step.left)
            step.grow(self.running)

    def _admit(self, wishes: list[tuple[Sequence, int]], because: Mapping[str, str], step: Granting) -> None:
        """Admit waiting sequences in order, each with pages for its next step, until one does not fit."""
        places = self.limits.max_num_seqs - len(self.running) - step.joining if wishes else 0
        for sequence, tokens in wishes:
            reason = because.get(sequence.request_id, "")
            if reason:
                reason = f"not admitted: {reason}"
            elif tokens:
                reason = step.admit(sequence, tokens, places)
            else:
                reason = step.obstacle(sequence, places) or "not admitted: the policy gives it no tokens yet"
            if reason:
                if (sequence.request_id, reason) != self._told:  # not the same reason every step
                    self._told = (sequence.request_id, reason)
                    step.decisions.append(Decision(sequence.request_id, "waiting", reason))
                return
            self._queue.remove(sequence)
            sequence.began = self._steps
            self._views.admitted += 1
            places -= 1 + len(sequence.followers)

    def _spans(self, step: Granting, decisions: list[Decision]) -> tuple[Span, ...]:
        """Return spans of one token first, as they are packed, then longer ones, each in order of arrival."""
        single: list[Span] = []
        longer: list[Span] = []
        lengths, new = step.lengths, tuple.__new__
        for sequence in self.running:
            length = lengths.get(sequence, 0)
            if not length:
                continue
            start = sequence.computed
            todo = len(sequence.token_ids) - start
            if length == todo == 1:  # as nearly always, and so without Span's own constructor
                single.append(new(Span, (sequence, start, 1, True, None, ())))
                continue
            if length < todo and length < step.todo(sequence):
                reason = f"prefill cut: {length} of {todo} tokens fit into this step"
                decisions.append(Decision(sequence.request_id, "cut", reason))
            (single if length == 1 else longer).append(Span(sequence, sequence.computed, length, length == todo))
        return (*single, *longer)

