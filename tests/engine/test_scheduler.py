"""The scheduler refuses by name, and a step has a cost; its histories are in test_histories.py."""

from __future__ import annotations

import pytest

from tests.calls import calls_of
from workbench.errors import WorkbenchError
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
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
