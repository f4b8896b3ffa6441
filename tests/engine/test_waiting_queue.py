"""The queue keeps waiting requests in each order a policy asks for; a kept order equals a sort made anew."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.calls import calls_of
from tests.engine import many_histories
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.request import Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import BUILT_IN_POLICIES, parse_policy
from workbench.scheduler.policy import RequestView, SchedulerState, WaitingIndex
from workbench.scheduler.scheduler import Scheduler
from workbench.scheduler.views import RequestViews


def by_priority(entry: RequestView) -> int:
    return entry.priority


def by_length(entry: RequestView) -> int:
    return -entry.num_new_tokens


def entry_of(order: int, tenant: str, priority: int, tokens: int) -> RequestView:
    return RequestView(f"r{order}", order, 0, tenant, priority, tokens, tokens, 0, tokens, False)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 3), st.booleans()),
        max_size=40,
    )
)
def test_orders_are_what_sorting_gives(moves: list[tuple[int, str, int, int, bool]]) -> None:
    """Whichever requests come or go; a key that is new each time is sorted each time, and few orders are kept."""
    kept, here = WaitingIndex(), dict[int, RequestView]()
    for order, tenant, priority, tokens, looks in moves:
        if order in here:
            kept.remove(order)
            del here[order]
        else:
            here[order] = entry_of(order, tenant, priority, tokens)
            kept.add(here[order])
        if not looks:
            continue
        waiting = tuple(here[each] for each in sorted(here))
        assert kept.views() == waiting and kept.views() is kept.views()
        for key in (by_priority, by_length, lambda entry: entry.tenant):
            assert kept.sorted_by(key) == tuple(sorted(waiting, key=key))
        assert kept.by_tenant() == {t: tuple(e for e in waiting if e.tenant == t) for t in {e.tenant for e in waiting}}
    assert len(kept._orders) <= WaitingIndex.MAX_SORT_KEYS


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.randoms(use_true_random=False))
def test_a_key_that_is_impure_or_raises_loses_and_doubles_no_request(
    moves: list[tuple[int, bool]], draw: Random
) -> None:
    """It raises where a policy asks for its order, not where a request comes or goes."""
    kept, here = WaitingIndex(), dict[int, RequestView]()

    def impure(entry: RequestView) -> int:
        return draw.randrange(4)

    def raising(entry: RequestView) -> int | str:
        if draw.random() < 0.2:
            raise KeyError(entry.request_id)
        return "a text" if draw.random() < 0.2 else 3

    for order, looks in moves:
        if order in here:
            kept.remove(order)
            del here[order]
        else:
            here[order] = entry_of(order, "a", 0, 1)
            kept.add(here[order])
        if looks:
            assert sorted(kept.sorted_by(impure)) == sorted(here.values())
            with suppress(KeyError, TypeError):
                assert sorted(kept.sorted_by(raising)) == sorted(here.values())
    assert kept.views() == tuple(here[each] for each in sorted(here))


def test_what_a_policy_is_shown_is_what_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In random histories, under every policy: entries, orders and tokens served that are kept from step to step."""
    state, shown = RequestViews.state, 0

    def checked(
        self: RequestViews,
        step: int,
        running: tuple[list[Sequence], list[Sequence], list[Sequence]],
        reserved_pages: list[int],
        by_id: dict,
        *times: float,
    ) -> SchedulerState:
        nonlocal shown
        found = state(self, step, running, reserved_pages, by_id, *times)
        plain = found.materialize()
        assert (*found.decodes, *found.prefills) == (*plain.decodes, *plain.prefills)
        runs = {sequence.arrival_index for sequence in running[0]}
        waiting = sorted(
            (each for each in by_id.values() if each.arrival_index not in runs), key=lambda each: each.arrival_index
        )
        assert tuple(found.running) == tuple(self._entry(sequence, True) for sequence in running[0])
        assert found.waiting == tuple(self._entry(sequence, False) for sequence in waiting)
        for key in (by_priority, by_length):
            assert found.waiting_by(key) == tuple(sorted(found.waiting, key=key))
        served = self.tenant_counters.served_tokens([*running[0], *waiting])
        assert all(
            found.served_tokens[entry.tenant] == served[entry.tenant] for entry in (*found.running, *found.waiting)
        )
        shown += 1
        return found

    monkeypatch.setattr(RequestViews, "state", checked)
    assert many_histories.run(range(60)) == {} and shown > 300


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES)
def test_a_plan_takes_no_more_work_where_a_thousand_wait(policy: str) -> None:
    """Counted in calls, with places free, so that the policy is asked: who does not fit is not looked at."""

    def calls(waiting: int) -> int:
        manager = KVCacheManager((PagePool(64, 16),), (KVCacheGroup(),), 1024)
        scheduler = Scheduler(
            manager, SchedulerLimits(max_num_seqs=12, max_num_batched_tokens=1024), 4096, parse_policy(policy)
        )
        for order, length in enumerate([17 + order for order in range(8)] + [900] * waiting):
            request = Request(f"r{order}", tuple(range(length)), SamplingParameters(max_tokens=60))
            scheduler.submit(Sequence.from_request(request, order))
        counted = 0
        for step in range(30):
            counted = calls_of(lambda: plans.append(scheduler.plan()))
            plan = plans[-1]
            assert plan is not None and (step == 0 or len(plan.spans) == len(scheduler.running) == 8)
            scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans if span.needs_sample})
        return counted

    plans: list = []
    assert calls(1000) <= calls(10) + 20
