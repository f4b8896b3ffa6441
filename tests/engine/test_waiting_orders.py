"""Who waits is kept in the orders that policies ask for; what is kept is what would be made anew."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.calls import calls_of
from tests.engine import many_histories
from workbench.cache.holdings import Holdings
from workbench.cache.pages import PagePool
from workbench.cache.tables import Table
from workbench.engine.limits import Limits
from workbench.engine.policy import Entry, State, WaitingOrders
from workbench.engine.schedule import BUILT_IN, policy_from
from workbench.engine.scheduler import Scheduler
from workbench.engine.views import Views
from workbench.request import Request, SamplingParameters, Sequence


def by_priority(entry: Entry) -> int:
    return entry.priority


def by_todo(entry: Entry) -> int:
    return -entry.todo


def entry_of(order: int, tenant: str, priority: int, todo: int) -> Entry:
    return Entry(f"r{order}", order, 0, tenant, priority, todo, todo, 0, todo, False)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 3), st.booleans()),
        max_size=40,
    )
)
def test_orders_are_what_sorting_gives(moves: list[tuple[int, str, int, int, bool]]) -> None:
    """Whoever comes or goes; a key that is new each time is sorted each time, and few are kept."""
    kept, here = WaitingOrders(), dict[int, Entry]()
    for order, tenant, priority, todo, looks in moves:
        if order in here:
            kept.remove(order)
            del here[order]
        else:
            here[order] = entry_of(order, tenant, priority, todo)
            kept.add(here[order])
        if not looks:
            continue
        waiting = tuple(here[each] for each in sorted(here))
        assert kept.entries() == waiting and kept.entries() is kept.entries()
        for key in (by_priority, by_todo, lambda entry: entry.tenant):
            assert kept.by(key) == tuple(sorted(waiting, key=key))
        assert kept.tenants() == {t: tuple(e for e in waiting if e.tenant == t) for t in {e.tenant for e in waiting}}
    assert len(kept._orders) <= WaitingOrders.MOST_KEYS


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.randoms(use_true_random=False))
def test_a_key_that_is_impure_or_raises_loses_and_doubles_nobody(moves: list[tuple[int, bool]], draw: Random) -> None:
    """Where it raises, that is where a policy asks for its order, not where somebody comes or goes."""
    kept, here = WaitingOrders(), dict[int, Entry]()

    def impure(entry: Entry) -> int:
        return draw.randrange(4)

    def raising(entry: Entry) -> int | str:
        if draw.random() < 0.2:
            raise KeyError(entry.id)
        return "a text" if draw.random() < 0.2 else 3

    for order, looks in moves:
        if order in here:
            kept.remove(order)
            del here[order]
        else:
            here[order] = entry_of(order, "a", 0, 1)
            kept.add(here[order])
        if looks:
            assert sorted(kept.by(impure)) == sorted(here.values())
            with suppress(KeyError, TypeError):
                assert sorted(kept.by(raising)) == sorted(here.values())
    assert kept.entries() == tuple(here[each] for each in sorted(here))


def test_what_a_policy_is_shown_is_what_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In random histories, under every policy: entries, orders and tokens served that are kept from step to step."""
    state, shown = Views.state, 0

    def checked(
        self: Views, step: int, running: list[Sequence], by_id: dict, uncovered: Iterable[Sequence] | None = None
    ) -> State:
        nonlocal shown
        found = state(self, step, running, by_id, uncovered)
        runs = {sequence.order for sequence in running}
        waiting = sorted((each for each in by_id.values() if each.order not in runs), key=lambda each: each.order)
        assert tuple(found.running) == tuple(self._entry(sequence, True) for sequence in running)
        assert found.waiting == tuple(self._entry(sequence, False) for sequence in waiting)
        for key in (by_priority, by_todo):
            assert found.by(key) == tuple(sorted(found.waiting, key=key))
        served = self.tenants.served([*running, *waiting])
        assert all(found.served[entry.tenant] == served[entry.tenant] for entry in (*found.running, *found.waiting))
        shown += 1
        return found

    monkeypatch.setattr(Views, "state", checked)
    assert many_histories.run(range(60)) == {} and shown > 300


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_plan_takes_no_more_work_where_a_thousand_wait(policy: str) -> None:
    """Counted in calls, with places free, so that the policy is asked: who does not fit is not looked at."""

    def calls(waiting: int) -> int:
        holdings = Holdings((PagePool(64, 16),), (Table(),), 1024)
        scheduler = Scheduler(holdings, Limits(12, 1024), 4096, policy_from(policy))
        for order, length in enumerate([17 + order for order in range(8)] + [900] * waiting):
            request = Request(f"r{order}", tuple(range(length)), SamplingParameters(max_tokens=60))
            scheduler.submit(Sequence.of(request, order))
        counted = 0
        for step in range(30):
            counted = calls_of(lambda: plans.append(scheduler.plan()))
            plan = plans[-1]
            assert plan is not None and (step == 0 or len(plan.spans) == len(scheduler.running) == 8)
            scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans if span.samples})
        return counted

    plans: list = []
    assert calls(1000) <= calls(10) + 20
