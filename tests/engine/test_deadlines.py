"""The policy `deadline`: as many requests as can be have their first token in time, and none starves."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.tiny import finals, model_of, request, runner_of, spec_of
from tests.helpers.recorded import Around
from workbench.experiment.experiment import SLO
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.measure.goodput import goodput
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.ordering import most_in_time
from workbench.scheduler.plan import StepPlan
from workbench.scheduler.policies import FCFS, Deadline, ShortestPrompt, parse_policy
from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState, SchedulingPolicy
from workbench.scheduler.prefill_rate import PrefillRate
from workbench.scheduler.scheduler import Scheduler
from workbench.scheduler.validate import items_of

SECONDS_PER_TOKEN = 0.125  # a power of two: sums of it are exact


def view(number: int, tokens: int, arrival_time: float, known: int = 0) -> RequestView:
    """Return a waiting request with `tokens` prompt tokens and `known` output tokens."""
    total = tokens + known
    return RequestView(f"r{number}", number, 0, "", 0, tokens, total, 0, total, False, arrival_time=arrival_time)


def state_of(waiting: list[RequestView], now: float, rate: float = SECONDS_PER_TOKEN) -> SchedulerState:
    no_pages = {entry.request_id: (0,) for entry in waiting}
    cached = dict.fromkeys(no_pages, 0)
    return SchedulerState(0, (), tuple(waiting), (100,), no_pages, {}, cached, now=now, seconds_per_prefill_token=rate)


def num_in_time(order: list[RequestView], begins: float, seconds: float) -> int:
    """Count the requests whose prompts end in time if they are computed one after another."""
    now, found = begins, 0
    for entry in order:
        now += SECONDS_PER_TOKEN * entry.num_new_tokens
        found += now <= entry.arrival_time + seconds
    return found


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 24)), min_size=1, max_size=6), st.integers(0, 8),
    st.integers(1, 24),
)  # fmt: skip
def test_no_order_serves_more_in_time(drawn: list[tuple[int, int]], later: int, quarters: int) -> None:
    arrivals = sorted(at for _, at in drawn)
    waiting = [view(i, tokens, at / 4) for i, ((tokens, _), at) in enumerate(zip(drawn, arrivals, strict=True))]
    begins, seconds = arrivals[-1] / 4 + later / 4, quarters / 4
    state = state_of(waiting, begins)
    order = list(most_in_time(state, seconds, begins))
    assert sorted(order) == sorted(waiting)
    decision = Deadline(ttft=seconds)(state)
    assert list(items_of(decision.order, "it", len(waiting))) == order, "the policy takes this order"
    best = max(num_in_time(list(each), begins, seconds) for each in permutations(waiting))
    assert num_in_time(order, begins, seconds) == best


def test_in_order_of_arrival_where_all_can_be_in_time() -> None:
    waiting = [view(0, 9, 0.0), view(1, 2, 0.25), view(2, 5, 0.5)]
    assert list(most_in_time(state_of(waiting, 0.5), 10.0, 0.5)) == waiting
    assert list(most_in_time(state_of(waiting, 0.5, rate=0.0), 1.0, 0.5)) == waiting, "nothing is measured yet"


def test_one_that_lost_its_pages_after_its_first_token_goes_first() -> None:
    waiting = [view(0, 2, 8.0), view(1, 30, 0.0, known=4)]
    assert [entry.request_id for entry in most_in_time(state_of(waiting, 8.0), 4.0, 8.0)] == ["r1", "r0"]


def test_a_cached_prompt_takes_the_time_of_its_new_tokens() -> None:
    waiting = [view(0, 8, 0.0), view(1, 8, 0.0)]
    state = state_of(waiting, 0.0)
    assert [entry.request_id for entry in most_in_time(state, 1.0, 0.0)] == ["r0", "r1"], "one of them fits"
    state.cached_tokens["r1"] = 7  # type: ignore[index]
    assert [entry.request_id for entry in most_in_time(state, 1.0, 0.0)][0] == "r1"


def test_cached_tokens_are_looked_up_only_where_not_all_can_be_in_time() -> None:
    """A look takes a walk through the prefix cache, for each of those that wait, before every step."""

    class Counted(dict[str, int]):
        looks = 0

        def __getitem__(self, name: str) -> int:
            self.looks += 1
            return super().__getitem__(name)

    waiting = [view(i, 4, 0.0) for i in range(8)]
    for seconds, looks in ((4.0, 0), (3.5, 8)):
        state = state_of(waiting, 0.0)
        state = replace(state, cached_tokens=Counted(state.cached_tokens))
        assert sorted(most_in_time(state, seconds, 0.0)) == waiting
        assert state.cached_tokens.looks == looks  # type: ignore[attr-defined]


def test_the_rate_is_of_busy_steps_with_prompts() -> None:
    rate = PrefillRate()
    assert rate.seconds_per_token == 0
    rate.end_step(0.0)
    rate.begin_step(0.0, 100)
    rate.end_step(2.0)
    assert rate.seconds_per_token == pytest.approx(0.02)
    rate.begin_step(2.0, 0)  # decodes alone
    rate.end_step(50.0)
    rate.begin_step(50.0, 100)
    rate.forget_step()  # the engine had nothing to do until the next request came
    rate.end_step(1000.0)
    assert rate.seconds_per_token == pytest.approx(0.02)
    for step in range(100):
        rate.begin_step(step * 3.0, 100)
        rate.end_step(step * 3.0 + 1.0)
    assert rate.seconds_per_token == pytest.approx(0.01, rel=0.05), "old steps are forgotten"


def test_time_without_work_is_not_of_a_prompt() -> None:
    manager = KVCacheManager((PagePool(8, 4),), (KVCacheGroup(),), 8)
    seen: list[SchedulerState] = []
    scheduler = Scheduler(manager, SchedulerLimits(max_num_batched_tokens=8), 32, watching(seen))
    for number, begins in enumerate((0.0, 100.0)):
        sequence = Sequence.from_request(Request(f"r{number}", (1, 2, 3), SamplingParameters(max_tokens=1)), number)
        scheduler.submit(sequence)
        plan = scheduler.plan(now=begins)
        assert plan is not None
        scheduler.commit(plan, {sequence.request_id: 1})
        scheduler.finish(sequence, FinishReason.LENGTH)
        assert scheduler.plan(now=begins + 50.0) is None  # asked in vain
    assert [state.seconds_per_prefill_token for state in seen] == [0.0, 0.0]


@pytest.mark.parametrize("compiling", [False, True])
def test_a_step_that_compiles_says_nothing_of_the_time_of_a_prompt(compiling: bool) -> None:
    seen: list[SchedulerState] = []
    runner = runner_of(model_of(spec_of()), policy=watching(seen), max_num_batched_tokens=8)

    class Executor(Around):
        compiles = 0

        def forward(self, plan: StepPlan) -> torch.Tensor:
            self.compiles += compiling
            return self.inner.forward(plan)

    Executor(runner)
    finals(runner, [request("long", 20, 2)])
    rates = [state.seconds_per_prefill_token for state in seen]
    assert len(rates) >= 3 and [rate > 0 for rate in rates[1:3]] == [not compiling] * 2


def watching(seen: list[SchedulerState]) -> SchedulingPolicy:
    """Return a policy that notes what it is shown."""

    def policy(state: SchedulerState) -> SchedulerDecision:
        seen.append(replace(state, waiting=tuple(state.waiting), running=tuple(state.running)))
        return FCFS()(state)

    return policy


def test_settings() -> None:
    assert parse_policy("deadline") == Deadline(ttft=1.0)
    assert parse_policy({"kind": "deadline", "ttft": 0.5, "starvation_limit": 7}) == Deadline(
        ttft=0.5, starvation_limit=7
    )
    assert parse_policy("shortest_prompt") == ShortestPrompt()


def test_a_policy_sees_limit_prediction_and_deadline_of_a_request() -> None:
    seen: list[SchedulerState] = []
    runner = runner_of(model_of(spec_of()), schedule={"policy": watching(seen)})
    asked = request("asked", 3, 4)
    list(runner.stream([replace(asked, deadline=2.5, predicted_tokens=9), replace(asked, request_id="plain")]))
    views = {entry.request_id: entry for state in seen for entry in (*state.waiting, *state.running)}
    for name, deadline, predicted in (("asked", 2.5, 9), ("plain", math.inf, 4)):
        entry = views[name]
        assert entry.is_running and (entry.max_tokens, entry.predicted_tokens) == (4, predicted)
        assert entry.deadline == entry.arrival_time + deadline


def test_a_request_with_a_deadline_attains_the_objective_by_then_alone() -> None:
    slo = SLO(ttft=1.0, tpot=1.0)
    figures = {"ttft_s": 0.5, "tpot_s": 0.1, "e2el_s": 3.0}
    for deadline, attains in ((None, 1), (3.5, 1), (3.0, 1), (2.5, 0)):
        assert goodput([{**figures, "deadline_s": deadline}], slo, None)["requests"] == attains
    assert goodput([figures], slo, None)["requests"] == 1, "records of older versions have none"
