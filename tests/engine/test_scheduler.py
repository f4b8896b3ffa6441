"""The scheduler under random histories: integers only, no model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.calls import calls_of
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool, pages_for
from workbench.kv_cache.prefix import RadixCache
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.scheduler.plan import RequestRefused, SchedulerLimits, StepPlan
from workbench.scheduler.scheduler import Scheduler

CONTEXT = 40


def sequence(order: int, prompt: int, most: int) -> Sequence:
    sampling = SamplingParameters(max_tokens=most)
    return Sequence.from_request(Request(f"r{order}", tuple(range(prompt)), sampling), order)


def scheduler_of(pools: tuple[PagePool, ...], limits: SchedulerLimits, context: int = CONTEXT) -> Scheduler:
    """Over tables whose queries read everything."""
    return Scheduler(
        KVCacheManager(pools, (KVCacheGroup(),) * len(pools), limits.max_num_batched_tokens), limits, context
    )


class Histories(RuleBasedStateMachine):
    """Submit, step, cancel in any order; `computed` and pages are checked after every move."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = (PagePool(9, 4), PagePool(11, 4))
        self.limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=7)
        self.scheduler = scheduler_of(self.pools, self.limits)
        self.open: list[Sequence] = []
        self.count = 0

    @rule(prompt=st.integers(1, 45), most=st.integers(1, 12))
    def submit(self, prompt: int, most: int) -> None:
        new = sequence(self.count, prompt, most)
        self.count += 1
        fits = prompt < CONTEXT and pages_for(min(prompt + most, CONTEXT) - 1, 4) <= 9
        if not fits:
            with pytest.raises(RequestRefused, match=r"\d"):
                self.scheduler.submit(new)
            return
        self.scheduler.submit(new)
        self.open.append(new)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.scheduler.plan()
            if plan is None:
                assert not self.open, "something waits and nothing is planned"
                return
            self.check(plan)
            before = {span.sequence.request_id: span.sequence.num_computed_tokens for span in plan.spans}
            chosen = {span.sequence.request_id: 1 for span in plan.spans if span.needs_sample}
            self.scheduler.commit(plan, chosen)
            for span in plan.spans:
                assert span.start == before[span.sequence.request_id]
                if len(span.sequence.output_ids) >= span.sequence.request.sampling.max_tokens or (
                    len(span.sequence.token_ids) >= CONTEXT
                ):
                    self.end(span.sequence, FinishReason.LENGTH)

    def check(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(plan.spans) <= self.limits.max_num_seqs
        lengths = [span.length for span in plan.spans]
        assert lengths == sorted(lengths, key=lambda length: length > 1), "decodes are packed first"
        for span in plan.spans:
            assert span.needs_sample == (span.end == len(span.sequence.token_ids))
            for pages in span.sequence.pages:
                assert len(pages) >= pages_for(span.end, 4)
        # The oldest always gets on, or all of the budget went to decodes before it.
        oldest = min(self.open, key=lambda s: s.arrival_index)
        assert oldest in [s.sequence for s in plan.spans] or plan.decode_tokens == self.limits.max_num_batched_tokens

    def end(self, ended: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(ended, reason)
        assert ended.finish_reason is reason
        self.open.remove(ended)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.open)), FinishReason.CANCELLED)

    @invariant()
    def pages_have_one_owner(self) -> None:
        for group, pool in enumerate(self.pools):
            held = [page for s in self.open for page in s.pages[group]]
            assert len(held) == len(set(held)) == pool.num_used
        for s in self.scheduler.waiting:
            assert s.num_computed_tokens == 0 and not any(s.pages)

    @invariant()
    def queues_are_in_order(self) -> None:
        orders = [s.arrival_index for s in (*self.scheduler.running, *self.scheduler.waiting)]
        assert orders == sorted(orders)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=tries(120), stateful_step_count=25, deadline=None)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 15)), min_size=1, max_size=8))
@settings(deadline=None)
def test_everything_submitted_ends(sizes: list[tuple[int, int]]) -> None:
    """However scarce the pages: no loop of preemptions, no request starves."""
    scheduler = scheduler_of((PagePool(9, 4),), SchedulerLimits(4, 8))
    going = [sequence(order, prompt, most) for order, (prompt, most) in enumerate(sizes)]
    for new in going:
        scheduler.submit(new)
    for _ in range(5_000):
        plan = scheduler.plan()
        if plan is None:
            break
        scheduler.commit(plan, {s.sequence.request_id: 1 for s in plan.spans if s.needs_sample})
        for span in plan.spans:
            if len(span.sequence.output_ids) == span.sequence.request.sampling.max_tokens:
                scheduler.finish(span.sequence, FinishReason.LENGTH)
    assert all(s.finish_reason is FinishReason.LENGTH for s in going)
    assert scheduler.pages_in_use == 0


def test_refusals_give_the_numbers() -> None:
    scheduler = scheduler_of((PagePool(2, 4),), SchedulerLimits())
    with pytest.raises(RequestRefused, match="40 prompt tokens leave no room in a context of 40"):
        scheduler.submit(sequence(0, 40, 1))
    with pytest.raises(RequestRefused, match="need 3 pages of 4 tokens, the cache has 2"):
        scheduler.submit(sequence(1, 5, 5))
    scheduler.submit(sequence(2, 5, 4))  # the last token's keys are never read: eight slots are enough
    with pytest.raises(WorkbenchError, match="at least 1"):
        SchedulerLimits(max_num_seqs=0)


def test_reasons_have_numbers() -> None:
    scheduler = scheduler_of((PagePool(3, 4),), SchedulerLimits())
    for order in range(2):
        scheduler.submit(sequence(order, 8, 3))
    plan = scheduler.plan()
    assert plan is not None
    reasons = {d.request_id: d.reason for d in plan.decisions}
    assert reasons["r1"] == "not admitted: 2 pages needed, 1 free"


@pytest.mark.parametrize(
    "tables",
    [
        (KVCacheGroup(),),
        (KVCacheGroup(), KVCacheGroup(sliding_window=256)),
        (KVCacheGroup(residual_length=128, quant_group=64), KVCacheGroup(sliding_window=192)),
    ],
)
def test_a_decode_step_is_planned_and_committed_in_few_calls_a_sequence(tables: tuple[KVCacheGroup, ...]) -> None:
    """With the index; in 64 steps each sequence fills a page. Calls, not seconds: `experiments.plan_cost` has those."""
    size, seqs, context = 64, 64, 2048
    pools = tuple(PagePool(seqs * context // size, size) for _ in tables)
    manager = KVCacheManager(pools, tables, 4096, RadixCache(pools, tables))
    scheduler = Scheduler(manager, SchedulerLimits(seqs, 4096), 2 * context)
    for order in range(seqs):
        ids = tuple(order + i for i in range(1024 + order))
        scheduler.submit(Sequence.from_request(Request(f"r{order}", ids, SamplingParameters(max_tokens=600)), order))

    def step() -> StepPlan:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans if span.needs_sample})
        return plan

    while step().phase != "decode" or scheduler.waiting:
        pass
    calls = calls_of(lambda: [step() for _ in range(size)]) / size
    assert len(scheduler.running) == seqs and calls < 20 * seqs


def test_a_child_takes_its_place_in_the_order() -> None:
    """The first of three samples is cancelled before its prefill is done: the second leads, older than who runs."""
    scheduler = scheduler_of((PagePool(30, 4),), SchedulerLimits(4, 32))
    first, second, third, younger = (sequence(order, 30, 3) for order in range(4))
    scheduler.submit(first, [second, third])
    scheduler.submit(younger)
    plan = scheduler.plan()
    assert plan is not None and scheduler.running == [first, younger]
    scheduler.commit(plan, {})
    scheduler.finish(first, FinishReason.CANCELLED)
    assert second.children == [third] and third.parent is second and second.parent is None
    scheduler.plan()
    assert scheduler.running == [second, younger]
