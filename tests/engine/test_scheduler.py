"""The scheduler refuses by name, and a step has a cost; its histories are in test_histories.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.calls import calls_of
from tests.engine.memory import Memory
from workbench.errors import WorkbenchError
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.kv_cache.prefix import RadixCache
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.plan import RequestRefused, StepPlan
from workbench.scheduler.policies import FCFS
from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState
from workbench.scheduler.scheduler import Scheduler

CONTEXT = 40
LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=32)


def sequence(order: int, prompt: int, most: int) -> Sequence:
    sampling = SamplingParameters(max_tokens=most)
    return Sequence.from_request(Request(f"r{order}", tuple(range(prompt)), sampling), order)


def scheduler_of(pools: tuple[PagePool, ...], limits: SchedulerLimits = LIMITS) -> Scheduler:
    """Over tables whose queries read everything."""
    return Scheduler(
        KVCacheManager(pools, (KVCacheGroup(),) * len(pools), limits.max_num_batched_tokens), limits, CONTEXT
    )


def test_refusals_give_the_numbers() -> None:
    scheduler = scheduler_of((PagePool(2, 4),))
    with pytest.raises(RequestRefused, match="40 prompt tokens leave no room in a context of 40"):
        scheduler.submit(sequence(0, 40, 1))
    with pytest.raises(RequestRefused, match="need 3 pages of 4 tokens, the cache has 2"):
        scheduler.submit(sequence(1, 5, 5))
    scheduler.submit(sequence(2, 5, 4))  # the last token's keys are never read: eight slots are enough


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
    scheduler = Scheduler(manager, SchedulerLimits(max_num_seqs=seqs, max_num_batched_tokens=4096), 2 * context)
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
    scheduler = scheduler_of((PagePool(30, 4),))
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


def test_pages_on_their_way_back_outlast_a_policy_that_raises() -> None:
    """It starts a preempted request, then raises; the next step loads its pages, and preempts the other to the CPU."""
    pools, group = (PagePool(20, 4),), (KVCacheGroup(),)
    manager = KVCacheManager(pools, group, 32, cpu_pools=(PagePool(3, 4),))
    scheduler = Scheduler(manager, LIMITS, CONTEXT)
    memory = Memory(scheduler)
    for order in range(2):
        prompt = tuple(range(100 * order, 100 * order + 10))
        scheduler.submit(Sequence.from_request(Request(f"r{order}", prompt), order))

    def raising(state: SchedulerState) -> Iterator[RequestView]:
        yield state.waiting[0]
        raise RuntimeError("midway")

    def step(place: int, preempted: int) -> None:
        scheduler.set_policy(lambda state: SchedulerDecision([state.running[place]], None, [state.running[preempted]]))
        plan = scheduler.plan()
        assert plan is not None
        memory.move(plan)
        memory.compute(plan)
        scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans})

    plan = scheduler.plan()
    assert plan is not None
    memory.compute(plan)
    scheduler.commit(plan, {"r0": 1, "r1": 1})
    step(1, preempted=0)
    assert scheduler.waiting[0].swapped is not None
    scheduler.set_policy(lambda state: SchedulerDecision(raising(state)))
    with pytest.raises(WorkbenchError, match="midway"):
        scheduler.plan()
    step(0, preempted=1)


def test_what_a_failed_plan_decided_on_a_request_ends_with_it() -> None:
    scheduler = scheduler_of((PagePool(30, 4),))

    def raising(state: SchedulerState) -> Iterator[RequestView]:
        yield from state.waiting
        raise RuntimeError("midway")

    first = sequence(0, 8, 3)
    scheduler.submit(first)
    scheduler.set_policy(lambda state: SchedulerDecision(raising(state)))
    with pytest.raises(WorkbenchError, match="midway"):
        scheduler.plan()
    scheduler.finish(first, FinishReason.CANCELLED)
    scheduler.submit(sequence(1, 8, 3))
    scheduler.set_policy(FCFS())
    plan = scheduler.plan()
    assert plan is not None and {decision.request_id for decision in plan.decisions} == {"r1"}


def test_an_order_is_walked_no_further_than_the_chunk_goes() -> None:
    """A request that starts with all that is left of the chunk has no second turn to look for."""
    scheduler = scheduler_of(
        (PagePool(90, 4),), SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=32, chunk_tokens=8)
    )
    scheduler.set_policy(FCFS())
    for order in range(20):
        scheduler.submit(sequence(order, 12, 3))
    plan = scheduler.plan()
    assert plan is not None
    (decision,) = plan.policy_decisions
    assert [item.request_id for item in decision.order if isinstance(item, RequestView)] == ["r0", "r1"]


def test_views_of_a_step_before_serve_no_request_that_has_ended() -> None:
    """A policy that goes on with them plans a step all the same."""
    scheduler = scheduler_of((PagePool(30, 4),))
    first, second = sequence(0, 8, 9), sequence(1, 8, 9)
    kept: dict[int, Iterable[RequestView]] = {}

    def keeping(state: SchedulerState) -> SchedulerDecision:
        return SchedulerDecision([kept.setdefault(len(state.running), state.running), state.waiting])

    scheduler.set_policy(keeping)
    for each in (first, second):
        scheduler.submit(each)
        for _ in range(2):
            plan = scheduler.plan()
            assert plan is not None
            scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans})
    scheduler.finish(first, FinishReason.STOP)
    plan = scheduler.plan()
    assert plan is not None and [span.sequence for span in plan.spans] == [second]


def test_the_next_plan_says_whom_a_policy_that_plans_nothing_preempted() -> None:
    scheduler = scheduler_of((PagePool(30, 4),))
    scheduler.submit(sequence(0, 8, 3))
    scheduler.plan()
    nothing = {"r0": "not now"}
    scheduler.set_policy(lambda state: SchedulerDecision(state.waiting, preempted=state.running, reasons=nothing))
    with pytest.raises(WorkbenchError, match="plans nothing"):
        scheduler.plan()
    scheduler.set_policy(FCFS())
    plan = scheduler.plan()
    assert plan is not None
    assert [(each.request_id, each.action) for each in plan.decisions] == [("r0", "preempted"), ("r0", "admitted")]
