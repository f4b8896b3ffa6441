"""The policy `deadline`: as many requests as can be have their first token in time, and none starves."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.tiny import finals, model_of, request, runner_of, spec_of
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import SLO
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.measure.goodput import goodput
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.scheduler.ordering import most_in_time
from workbench.scheduler.plan import SchedulerLimits, StepPlan
from workbench.scheduler.policies import FCFS, Deadline, ShortestPrompt, parse_policy
from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState, SchedulingPolicy
from workbench.scheduler.prefill_rate import PrefillRate
from workbench.scheduler.scheduler import Scheduler

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
    order = list(most_in_time(state_of(waiting, begins), seconds, begins))
    assert sorted(order) == sorted(waiting)
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
    seen: list[float] = []
    scheduler = Scheduler(manager, SchedulerLimits(max_num_batched_tokens=8), 32, watching(seen))
    for number, begins in enumerate((0.0, 100.0)):
        sequence = Sequence.from_request(Request(f"r{number}", (1, 2, 3), SamplingParameters(max_tokens=1)), number)
        scheduler.submit(sequence)
        plan = scheduler.plan(now=begins)
        assert plan is not None
        scheduler.commit(plan, {sequence.request_id: 1})
        scheduler.finish(sequence, FinishReason.LENGTH)
        assert scheduler.plan(now=begins + 50.0) is None  # asked in vain
    assert seen == [0.0, 0.0]


@pytest.mark.parametrize("compiling", [False, True])
def test_a_step_that_compiles_says_nothing_of_the_time_of_a_prompt(compiling: bool) -> None:
    seen: list[float] = []
    runner = runner_of(model_of(spec_of()), policy=watching(seen), max_num_batched_tokens=8)
    forward = runner.executor.forward

    class Executor:
        compiles, kernel_seconds, artifacts = 0, None, MappingProxyType({})

        def forward(self, plan: StepPlan) -> torch.Tensor:
            self.compiles += compiling
            return forward(plan)

    runner.set_executor(Executor())  # type: ignore[arg-type]
    finals(runner, [request("long", 20, 2)])
    assert len(seen) >= 3 and [each > 0 for each in seen[1:3]] == [not compiling] * 2


def watching(seen: list[float]) -> SchedulingPolicy:
    """Return a policy that notes the seconds of a prefill token that it is shown."""

    def policy(state: SchedulerState) -> SchedulerDecision:
        seen.append(state.seconds_per_prefill_token)
        return FCFS()(state)

    return policy


def served_in_time(policy: object, seconds: float, every: float, count: int) -> int:
    """Return how many of `count` requests have a first token in time: a step takes 0.125 s for each of its tokens."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=8)
    manager = KVCacheManager((PagePool(400, 4),), (KVCacheGroup(),), 8)
    scheduler, now, late, coming = Scheduler(manager, limits, 200, parse_policy(policy)), 0.0, 0, 0
    arrivals = [(every * i, 4 + 12 * (i % 3)) for i in range(count)]
    begun: set[str] = set()
    while coming < count or scheduler.has_unfinished_requests:
        while coming < count and (arrivals[coming][0] <= now or not scheduler.has_unfinished_requests):
            at, tokens = arrivals[coming]
            now = max(now, at)
            new = Request(f"r{coming}", tuple(range(tokens)), SamplingParameters(max_tokens=2))
            sequence = Sequence.from_request(new, coming)
            sequence.arrival_time = at
            scheduler.submit(sequence)
            coming += 1
        plan = scheduler.plan(now=now)
        assert plan is not None
        now += SECONDS_PER_TOKEN * sum(span.length for span in plan.spans)
        scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans if span.needs_sample})
        for span in plan.spans:
            sequence = span.sequence
            if span.needs_sample and sequence.request_id not in begun:
                begun.add(sequence.request_id)
                late += now > sequence.arrival_time + seconds
            if len(sequence.output_ids) >= 2:
                scheduler.finish(sequence, FinishReason.LENGTH)
    assert len(begun) == count, "none starves"
    return count - late


def test_more_are_in_time_than_by_other_policies_under_overload() -> None:
    load = {"seconds": 6.0, "every": 1.5, "count": 60}  # 2.25 s of work arrive each 1.5 s
    served = served_in_time({"kind": "deadline", "ttft": 6.0}, **load)
    assert served > 2 * served_in_time("fcfs", **load)
    assert served >= served_in_time("shortest_prompt", **load)


def test_settings() -> None:
    assert parse_policy("deadline") == Deadline(ttft=1.0)
    assert parse_policy({"kind": "deadline", "ttft": 0.5, "starvation_limit": 7}) == Deadline(
        ttft=0.5, starvation_limit=7
    )
    assert parse_policy("shortest_prompt") == ShortestPrompt()
    with pytest.raises(WorkbenchError, match="ttft"):
        parse_policy({"kind": "deadline", "ttft": 0})


class Watching:
    """First come, first served; keeps the views that it saw."""

    def __init__(self) -> None:
        self.seen: dict[str, RequestView] = {}

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        self.seen |= {entry.request_id: entry for entry in (*state.waiting, *state.running)}
        return FCFS()(state)


def test_a_policy_sees_limit_prediction_and_deadline_of_a_request() -> None:
    watching = Watching()
    runner = runner_of(model_of(spec_of()), schedule={"policy": watching})
    asked = request("asked", 3, 4)
    list(runner.stream([replace(asked, deadline=2.5, predicted_tokens=9), replace(asked, request_id="plain")]))
    for name, deadline, predicted in (("asked", 2.5, 9), ("plain", math.inf, 4)):
        entry = watching.seen[name]
        assert entry.is_running and (entry.max_tokens, entry.predicted_tokens) == (4, predicted)
        assert entry.deadline == entry.arrival_time + deadline


def test_a_request_with_a_deadline_attains_the_objective_by_then_alone() -> None:
    slo = SLO(ttft=1.0, tpot=1.0)
    figures = {"ttft_s": 0.5, "tpot_s": 0.1, "e2el_s": 3.0}
    for deadline, attains in ((None, 1), (3.5, 1), (3.0, 1), (2.5, 0)):
        assert goodput([{**figures, "deadline_s": deadline}], slo, None)["requests"] == attains
    assert goodput([figures], slo, None)["requests"] == 1, "records of older versions have none"
