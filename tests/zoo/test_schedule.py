"""The zoo's schedules keep the laws of their kit or give them up by name, and order as their equations say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zoo.loaded import part_of
from workbench.request import Request, SamplingParameters
from workbench.scheduler.plan import StepPlan
from workbench.scheduler.policies import FCFS, PrefillFirst
from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState
from workbench.testing import check_policy
from workbench.testing.law import LawBroken
from workbench.testing.policy_scenarios import (
    PAGE_SIZE,
    STEP_SECONDS,
    ArrivingRequest,
    PolicyScenario,
    ScheduleHarness,
    play_scenario,
    policy_scenarios,
)


class Unexcused:
    """A policy without its `gives_up`."""

    gives_up = frozenset()

    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        return self.inner(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("sjf", {"predictor": name}) for name in ("given", "limit", "prompt")] + [("trail", {}), ("vtc", {})],
    ids=str,
)
def test_laws_that_are_given_up_do_not_hold(name: str, arguments: dict[str, Any]) -> None:
    policy = part_of(name, **arguments)
    report = check_policy(Unexcused(policy), examples=10)
    assert {law.law for law in report.laws if not law.ok} == set(policy.gives_up)


def actions(plan: StepPlan, action: str) -> list[str]:
    return [decision.request_id for decision in plan.decisions if decision.action == action]


def decisions(name: str, scenario: PolicyScenario, **arguments: Any) -> Iterator[tuple[SchedulerState, list[str]]]:
    """Yield the state and the admitted requests of every step, and check that decodes are never held back."""
    for played, plan in play_scenario(scenario, part_of(name, **arguments)):
        if played.last_decision is not None:
            state, _ = played.last_decision
            served = {span.sequence.request_id for span in plan.spans} | {*actions(plan, "preempted")}
            assert all(entry.request_id in served for entry in state.decodes[: state.limits.max_num_batched_tokens])
            waiting = {entry.request_id for entry in state.waiting}
            yield state, [name for name in actions(plan, "admitted") if name in waiting]


def slack(entry: RequestView, now: float) -> float:
    """d - t - c, as in the docstring, with the defaults of the part."""
    deadline = entry.arrival_time + 30 if math.isinf(entry.deadline) else entry.deadline
    output = max(0, entry.predicted_tokens - (entry.num_tokens - entry.num_prompt_tokens))
    return deadline - now - (entry.num_new_tokens * 0.0001 + output * 0.02)


ORDERS: dict[str, Callable[[SchedulerState, RequestView], Any]] = {
    "edf": lambda s, e: e.arrival_time + 30 if math.isinf(e.deadline) else e.deadline,
    "least_slack": lambda s, e: slack(e, s.now),
    "sjf": lambda s, e: e.predicted_tokens,
    "trail": lambda s, e: e.predicted_tokens - (e.num_tokens - e.num_prompt_tokens),
    "cache_aware": lambda s, e: -s.cached_tokens[e.request_id],
    "hrrn": lambda s, e: -((s.now - e.arrival_time) / (e.num_prompt_tokens * 0.0001 + e.predicted_tokens * 0.02) + 1),
    "fastserve": lambda s, e: max(0, math.ceil(math.log2(e.num_tokens / 512))),
    "vtc": lambda s, e: s.served_tokens[e.tenant],
}


@pytest.mark.parametrize("name", ORDERS)
@given(policy_scenarios())
def test_who_begins_is_first_by_the_equation(name: str, scenario: PolicyScenario) -> None:
    for state, begun in decisions(name, scenario):
        left = {entry.request_id: (ORDERS[name](state, entry), entry.arrival_index) for entry in state.waiting}
        for request_id in begun[:1] if name == "vtc" else begun:  # there each choice charges its tenant
            key, arrival = left.pop(request_id)
            assert all(key < other + 1e-9 for other, _ in left.values())
            assert isinstance(key, float) or all((key, arrival) < other for other in left.values())


def one_machine(policy: Any, jobs: list[tuple[int, float]]) -> list[float]:
    """Serve jobs of (steps, seconds to the deadline), all there at once, one at a time; return when each is done."""
    scenario = PolicyScenario((), pages=200, max_num_seqs=1, max_num_batched_tokens=64)
    played = ScheduleHarness.from_scenario(scenario, policy)
    names = {
        played.submit(ArrivingRequest(0, 1, steps, deadline=due, predicted_tokens=steps), f"job {number}"): number
        for number, (steps, due) in enumerate(jobs)
    }
    ends = [0.0] * len(jobs)
    while played.unfinished:
        before = [*played.unfinished]
        played.step()
        for sequence in before:
            if sequence not in played.unfinished:
                ends[names[sequence]] = played.now
    return ends


def every_order(jobs: list[tuple[int, float]]) -> Iterator[list[float]]:
    """Yield when each job is done, for every order of service."""
    for order in itertools.permutations(range(len(jobs))):
        ends, now = [0.0] * len(jobs), 0.0
        for number in order:
            now += jobs[number][0] * STEP_SECONDS
            ends[number] = now
        yield ends


JOBS = st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0, 6.0])), min_size=2, max_size=5)


@given(JOBS)
def test_edf_meets_all_deadlines_if_any_order_does(jobs: list[tuple[int, float]]) -> None:
    """And more: its greatest lateness is the least of all orders (Jackson, 1955)."""

    def latest(ends: list[float]) -> float:
        return max(end - due for end, (_, due) in zip(ends, jobs, strict=True))

    assert latest(one_machine(part_of("edf"), jobs)) == pytest.approx(min(map(latest, every_order(jobs))))


@given(JOBS)
def test_sjf_has_the_least_mean_time(jobs: list[tuple[int, float]]) -> None:
    assert sum(one_machine(part_of("sjf"), jobs)) == pytest.approx(min(map(sum, every_order(jobs))))


def counters(policy: Any, steps: int = 60) -> Iterator[dict[str, int]]:
    """Yield tokens computed by tenant while two always have waiting requests: short and few, long and many."""
    scenario = PolicyScenario((), pages=30, max_num_seqs=4, max_num_batched_tokens=8)
    played, count = ScheduleHarness.from_scenario(scenario, policy), itertools.count()
    kinds = ArrivingRequest(0, 3, 2, tenant=0), ArrivingRequest(0, 20, 6, tenant=1)
    for _ in range(steps):
        for tenant, kind in enumerate(kinds):
            name = f"tenant {tenant}"
            while sum(not s.num_computed_tokens for s in played.unfinished if s.request.tenant == name) < 4:
                played.submit(kind, f"{tenant}/{next(count)}")
        played.step()
        assert played.last_decision is not None
        yield {name: played.last_decision[0].served_tokens.get(name, 0) for name in ("tenant 0", "tenant 1")}


def test_vtc_keeps_backlogged_tenants_within_its_bound() -> None:
    bound = 2 * max(20, 30 * PAGE_SIZE)  # 2 max(w_p L_input, w_q M), M: tokens that fit the pages
    gaps = [abs(each["tenant 0"] - each["tenant 1"]) for each in counters(part_of("vtc"), 400)]
    assert max(gaps) <= bound
    assert max(gaps[200:]) <= max(gaps[:200]) + 26, "the gap does not grow with time"
    assert max(abs(each["tenant 0"] - each["tenant 1"]) for each in counters(FCFS(), 400)) > bound, "as fcfs breaks it"


def test_cache_aware_order_computes_each_shared_beginning_once() -> None:
    """Theorem 3.1 of SGLang: with a cache for hardly more than one request, edges of the tree are computed once."""

    def computed(policy: Any) -> int:
        scenario = PolicyScenario((), pages=8, max_num_seqs=1, max_num_batched_tokens=64, prefix=True)
        played, total = ScheduleHarness.from_scenario(scenario, policy), 0
        for number in range(12):  # three beginnings of four pages, in turn, each with four ends of a page
            ids = (10 + number % 3,) * (4 * PAGE_SIZE) + (20 + number,) * PAGE_SIZE + (1,)
            played.unfinished.append(_submitted(played, Request(f"r{number}", ids, SamplingParameters(max_tokens=1))))
        while played.unfinished:
            plan = played.step()
            assert plan is not None
            total += sum(span.length for span in plan.spans)
        return total

    edges = 3 * 4 * PAGE_SIZE + 12 * (PAGE_SIZE + 1)
    assert computed(part_of("cache_aware")) == edges < computed(FCFS())


def _submitted(played: ScheduleHarness, request: Request) -> Any:
    from workbench.request import Sequence

    sequence = Sequence.from_request(request, played.num_submitted)
    played.scheduler.submit(sequence, [])
    played.num_submitted += 1
    return sequence


@given(policy_scenarios())
def test_dlpm_lies_between_fairness_and_locality(scenario: PolicyScenario) -> None:
    everything = [(state, begun) for state, begun in decisions("dlpm", scenario, quantum=10**9)]
    assert everything == [(state, begun) for state, begun in decisions("cache_aware", scenario)]
    for state, begun in decisions("dlpm", scenario, quantum=1):
        if begun:
            tenant = next(entry.tenant for entry in state.waiting if entry.request_id == begun[0])
            assert state.served_tokens[tenant] == min(state.served_tokens[e.tenant] for e in state.waiting)


CROWDED = st.builds(
    PolicyScenario,
    st.lists(
        st.builds(
            ArrivingRequest, st.integers(0, 4), st.integers(1, 6), st.integers(3, 12),
            predicted_tokens=st.sampled_from([1, 4, 12]),
        ),
        min_size=2, max_size=5,
    ).map(tuple),
    pages=st.just(40), max_num_seqs=st.integers(1, 2), max_num_batched_tokens=st.just(9),
)  # fmt: skip


@given(CROWDED, st.sampled_from([0.0, 0.5, 1.0]))
def test_trail_preempts_young_requests_alone(scenario: PolicyScenario, share: float) -> None:
    for state, name in preempted("trail", scenario, share=share):
        (entry,) = (each for each in state.running if each.request_id == name)
        generated = entry.num_tokens - entry.num_prompt_tokens
        assert generated < share * entry.predicted_tokens
        assert entry.predicted_tokens - generated > min(e.predicted_tokens - e.num_tokens + e.num_prompt_tokens
                                                        for e in state.waiting)  # fmt: skip


@pytest.mark.parametrize(
    ("after", "share", "times"), [(1, 0.0, 0), (1, 0.05, 0), (1, 0.25, 1), (5, 0.25, 0), (5, 0.5, 1), (5, 1.0, 1)]
)
def test_trail_preempts_at_the_share(after: int, share: float, times: int) -> None:
    late = ArrivingRequest(after, 1, 2, predicted_tokens=2)  # the other one has `after` of its 12 tokens then
    scenario = PolicyScenario((ArrivingRequest(0, 1, 12), late), pages=40, max_num_seqs=1)
    assert len(list(preempted("trail", scenario, share=share))) == times


@given(CROWDED)
def test_fastserve_preempts_for_upper_levels_alone(scenario: PolicyScenario) -> None:
    policy = part_of("fastserve", quantum=2)
    for state, name in preempted("fastserve", scenario, quantum=2):
        (entry,) = (each for each in state.running if each.request_id == name)
        assert policy.level(entry) > min(policy.level(each) for each in state.waiting) and entry.num_preemptions < 2


def preempted(name: str, scenario: PolicyScenario, **arguments: Any) -> Iterator[tuple[SchedulerState, str]]:
    """Yield the state and the request for each preemption by the policy."""
    for played, _ in play_scenario(scenario, part_of(name, **arguments)):
        state, decision = played.last_decision or (None, SchedulerDecision())
        for entry in decision.preempted:
            assert state is not None
            yield state, entry.request_id


@given(st.integers(1, 5000), st.integers(1, 600))
def test_fastserve_levels(tokens: int, quantum: int) -> None:
    policy = part_of("fastserve", quantum=quantum)
    entry = RequestView("r", 0, 0, "", 0, tokens, tokens, 0, tokens, False)
    level, used = 0, quantum
    while tokens > used:  # the quanta are q, 2q, 4q, ...: of all levels up to here, together or the last alone
        level, used = level + 1, 2 * used
    assert policy.level(entry) == level


@given(policy_scenarios())
def test_sarathi_never_stalls_a_decode(scenario: PolicyScenario) -> None:
    assert _stalls(FCFS(), scenario) == 0


def test_prefill_first_stalls_decodes() -> None:
    arrivals = ArrivingRequest(0, 2, 6), ArrivingRequest(2, 20, 2)
    assert _stalls(PrefillFirst(), PolicyScenario(arrivals, pages=30)) > 0


def _stalls(policy: Any, scenario: PolicyScenario) -> int:
    """Count steps in which a decoding request that keeps its pages gets no token though the step has room for all."""
    count = 0
    for played, plan in play_scenario(scenario, policy):
        if played.last_decision is not None:
            state = played.last_decision[0]
            decoding = {e.request_id for e in state.running if e.is_decoding}
            gone = {d.request_id for d in plan.decisions if d.action == "preempted"}
            served = {span.sequence.request_id for span in plan.spans}
            count += len(decoding) <= state.limits.max_num_batched_tokens and bool(decoding - served - gone)
    return count


def test_the_laws_here_can_break() -> None:
    jobs = [(6, 6.0), (1, 0.5), (2, 1.0)]
    assert max(end - due for end, (_, due) in zip(one_machine(FCFS(), jobs), jobs, strict=True)) > 0
    assert all(end <= due for end, (_, due) in zip(one_machine(part_of("edf"), jobs), jobs, strict=True))
    assert sum(one_machine(FCFS(), jobs)) > sum(one_machine(part_of("sjf"), jobs))
    with pytest.raises(LawBroken):
        list(play_scenario(PolicyScenario((ArrivingRequest(0, 4, 2),)), lambda state: SchedulerDecision()))
