"""Steps in which every request decodes are planned without asking the policy for each: the plans are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine import history, many_histories
from tests.engine.history import POLICIES
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.request import Request, SamplingParameters, Sequence
from workbench.scheduler.plan import SchedulerLimits, StepPlan
from workbench.scheduler.policies import FCFS, BuiltInPolicy, Priority
from workbench.scheduler.policy import SchedulerDecision, SchedulerState
from workbench.scheduler.scheduler import Scheduler

KNOWN = [name for name in POLICIES if name != "wild"]


def everything(plan: StepPlan | None) -> Any:
    """Return a plan as plain values, with the number of every page."""
    if plan is None:
        return None
    spans = [(s.sequence.request_id, *s[1:], [list(pages) for pages in s.sequence.pages]) for s in plan.spans]
    moves = (plan.transfers.swap_outs, plan.transfers.copies, plan.transfers.swap_ins)
    return plan.step, spans, plan.decisions, [list(each) for each in moves], plan.padding_rows, plan.policy_decisions


def played(seed: int, policy: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], int]:
    """Every plan of a history, and how many of them were made in parts."""
    plans: list[Any] = []
    made = 0
    plan, none_begins = Scheduler.plan, Scheduler._none_begins

    def noted(self: Scheduler, *asked: Any) -> StepPlan | None:
        found = plan(self, *asked)
        plans.append(everything(found))
        return found

    def counted(self: Scheduler, *asked: Any) -> bool:
        nonlocal made
        found = in_parts and none_begins(self, *asked)
        made += found
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "plan", noted)
        patch.setattr(Scheduler, "_none_begins", counted)
        patch.setattr(history, "POLICIES", [policy])
        many_histories.play(random.Random(seed))
    return plans, made


@pytest.mark.parametrize("policy", dict.fromkeys(KNOWN))
def test_a_step_decided_in_parts_is_what_the_policy_decides(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random histories: the same spans, reasons, decisions, moves and page numbers, step by step."""
    made = 0
    for seed in range(40):
        quick, count = played(seed, policy, True, monkeypatch)
        plain, _ = played(seed, policy, False, monkeypatch)
        assert quick == plain
        made += count
    assert (made > 80) == policy.startswith("continuous"), "static batches are not decided in parts"


@pytest.mark.parametrize("starvation_limit", [5, 12, 1000])
def test_the_oldest_past_the_starvation_limit_keeps_its_pages_longest(starvation_limit: int) -> None:
    """Among those that run on and on only the step's number changes, and with it the order of priorities."""
    plans = []
    for in_parts in (True, False):
        scheduler = crowded(Priority(starvation_limit=starvation_limit))
        if not in_parts:
            scheduler._in_parts = None
        plans.append([everything(one_step(scheduler)) for _ in range(18)])
    assert plans[0] == plans[1]


def crowded(policy: BuiltInPolicy) -> Scheduler:
    """Two that decode for long, the older of them less urgent, and a third with a place and no pages."""
    scheduler = Scheduler(KVCacheManager((PagePool(9, 8),), (KVCacheGroup(),), 64), SchedulerLimits(4, 64), 64, policy)
    for order, length in enumerate((9, 9, 48)):
        asks = SamplingParameters(max_tokens=20)
        request = Request(f"r{order}", (1,) * length, asks, priority=(1, 0, 2)[order])
        scheduler.submit(Sequence.from_request(request, order))
    return scheduler


def one_step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None and len(plan.spans) == 2
    scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans})
    return plan


@pytest.mark.parametrize("asked_for", [FCFS, Priority])
def test_a_policy_made_from_one_of_ours_is_asked(asked_for: type[BuiltInPolicy]) -> None:
    """A subclass that changes `__call__` alone has changed the policy."""
    asked: list[int] = []

    class Mine(asked_for):
        def __call__(self, state: SchedulerState) -> SchedulerDecision:
            asked.append(state.step)
            return super().__call__(state)

    for policy in (Mine(), asked_for()):
        scheduler = crowded(policy)
        asked.clear()
        for _ in range(6):
            one_step(scheduler)
        assert len(asked) == (6 if isinstance(policy, Mine) else 0)
