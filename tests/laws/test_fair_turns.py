"""Under `fair`, the tenant with the fewest tokens goes first, within a step as over steps."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.request import Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import Fair
from workbench.scheduler.scheduler import Scheduler

STEP, SLOTS = 12, 6


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), min_size=1, max_size=8))
@example([("a", 3), ("a", 3), ("a", 3), ("b", 3)])
@example([("a", 4), ("a", 1), ("b", 1), ("b", 1), ("b", 1)])
def test_a_step_admits_the_tenant_with_the_fewest_tokens(asked: list[tuple[str, int]]) -> None:
    """The expected order counts tokens by hand: an admitted prompt counts at once."""
    limits = SchedulerLimits(max_num_seqs=SLOTS, max_num_batched_tokens=STEP)
    scheduler = Scheduler(KVCacheManager((PagePool(50, 4),), (KVCacheGroup(),), STEP), limits, 100, Fair())
    for number, (tenant, prompt) in enumerate(asked):
        request = Request(str(number), (0,) * prompt, SamplingParameters(max_tokens=2), tenant=tenant)
        scheduler.submit(Sequence.from_request(request, number))
    plan = scheduler.plan()
    assert plan is not None
    admitted = [int(decision.request_id) for decision in plan.decisions if decision.action == "admitted"]
    waiting, served, expected, left = list(range(len(asked))), dict.fromkeys("abc", 0), list[int](), STEP
    while waiting and left > 0 and len(expected) < SLOTS:
        first = min(waiting, key=lambda number: (served[asked[number][0]], number))
        waiting.remove(first)
        expected.append(first)
        served[asked[first][0]] += asked[first][1]
        left -= asked[first][1]
    assert admitted == expected
