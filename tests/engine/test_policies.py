"""Plans of each policy, in integers; how the scheduler carries out decisions; and the reasons it states."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import accumulate, cycle
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import plan_cost
from tests.engine.line import Line
from tests.engine.tiny import model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import (
    BUILT_IN_POLICIES,
    FCFS,
    CustomPolicy,
    Fair,
    Interleaved,
    PolicySetting,
    Priority,
    ShortestPrompt,
    parse_policy,
)
from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState, Turn
from workbench.scheduler.validate import items_of
from workbench.trace.events import Finished, Stepped


def test_static_lets_no_request_join_until_all_have_ended() -> None:
    line = Line("fcfs", "static")
    for prompt, most in ((10, 2), (10, 6), (10, 3)):
        line.submit(prompt, most)
    assert line.step() == {"r0": 10, "r1": 6}
    assert line.step() == {"r1": 4, "r2": 10}, "the batch is gathered, and no request decodes meanwhile"
    assert line.step() == {"r0": 1, "r1": 1, "r2": 1}
    line.submit(3)
    assert line.step() == {"r1": 1, "r2": 1}
    assert line.said == ["r3 not admitted: a batch runs, and 2 sequences in it have not ended"]
    while line.scheduler.running:
        assert "r3" not in line.step()
    assert line.step() == {"r3": 3}


def test_continuous_lets_every_request_join_that_fits() -> None:
    line = Line("fcfs")
    line.submit(4)
    line.step()
    line.submit(20)
    assert line.step() == {"r0": 1, "r1": 15}
    assert line.step() == {"r0": 1, "r1": 5}


def test_a_chunk_is_kept_to_beside_decodes() -> None:
    line = Line("fcfs", chunk_tokens=5)
    line.submit(4)
    line.step()
    line.submit(12)
    line.submit(12)
    assert [line.step() for _ in range(3)] == [{"r0": 1, "r1": 5}, {"r0": 1, "r1": 5}, {"r0": 1, "r1": 2, "r2": 3}]


def test_without_chunked_prefill_a_prompt_is_computed_at_once() -> None:
    line = Line("fcfs", chunked_prefill=False)
    line.submit(10)
    line.submit(10)
    assert line.step() == {"r0": 10} and line.said[-1].startswith("r1 not admitted")
    assert line.step() == {"r0": 1, "r1": 10}


def test_prefill_first_and_decode_first() -> None:
    eager, patient = Line("prefill_first"), Line({"kind": "decode_first", "starvation_limit": 6})
    for line in (eager, patient):
        line.submit(4)
        line.step()
        line.submit(20)
    assert [eager.step() for _ in range(2)] == [{"r1": 16}, {"r0": 1, "r1": 4}]
    assert [patient.step() for _ in range(6)] == [{"r0": 1}] * 6
    assert patient.step() == {"r0": 1, "r1": 15}, "who has waited long enough is prefilled beside"


def test_short_prompts_urgent_requests_and_tenants_go_first() -> None:
    short, urgent, fair = (Line(name, max_num_batched_tokens=6) for name in ("shortest_prompt", "priority", "fair"))
    for prompt in (6, 5, 2):
        short.submit(prompt)
    assert short.step() == {"r2": 2, "r1": 4}
    for priority in (2, 1, 0):
        urgent.submit(6, priority=priority)
    assert [next(iter(urgent.step())) for _ in range(1)] == ["r2"]
    for tenant in ("a", "a", "a", "b"):
        fair.submit(6, most=1, tenant=tenant)
    assert [fair.step() for _ in range(4)] == [{"r0": 6}, {"r3": 6}, {"r1": 6}, {"r2": 6}]


def test_a_tenant_that_was_away_has_no_credit() -> None:
    line = Line("fair", max_num_batched_tokens=6)
    for _ in range(4):
        line.submit(6, most=1, tenant="a")
    for _ in range(2):
        line.step()
    for tenant in ("b", "b"):
        line.submit(6, most=1, tenant=tenant)
    assert [next(iter(line.step())) for _ in range(4)] == ["r2", "r4", "r3", "r5"], "b begins where a is"


def test_the_least_urgent_gives_way() -> None:
    line = Line("priority", pages=7)
    line.submit(8, priority=0)
    line.submit(8, priority=5)
    line.submit(4, priority=1)
    said: list[str] = []
    for _ in range(6):
        line.step()
        said += [words for words in line.said if "is preempted" in words]
    assert said[0].startswith("r1 ") and "the last in order is preempted" in said[0]


def test_a_policy_is_asked_only_where_there_is_something_to_decide() -> None:
    asked: list[int] = []

    class Counting(FCFS):
        def __call__(self, state: SchedulerState) -> SchedulerDecision:
            asked.append(state.step)
            return super().__call__(state)

    line = Line(Counting(), max_num_seqs=2)
    for _ in range(3):
        line.submit(4, most=9)
    for _ in range(8):
        line.step()
    assert asked == [0, 1] or asked == [0]
    line.step()
    line.step()
    assert len(asked) > 1, "a request ended, and the third may begin"


def test_a_padded_batch_computes_as_many_rows_to_its_end() -> None:
    """Three run; each that ends leaves a row behind, until the batch is over and the next begins without any."""
    runner = runner_of(model_of(spec_of()), policy=parse_policy("fcfs", "padded"), max_num_seqs=3)
    requests = [request(f"r{i}", 5, most) for i, most in enumerate((2, 4, 7, 3, 5))]
    steps = [event for event in runner.stream(requests) if isinstance(event, Stepped) and event.phase == "decode"]
    assert [(step.requests, step.padding_rows) for step in steps] == (
        [(3, 0)] + [(2, 1)] * 2 + [(1, 2)] * 3 + [(2, 0)] * 2 + [(1, 1)] * 2
    )


def test_each_policy_that_a_setting_may_name_is_in_the_list() -> None:
    """Laws of policies are tested for those in the list, and messages name them."""
    named = {*get_args(get_args(PolicySetting)[0])} - {CustomPolicy}
    assert {*BUILT_IN_POLICIES.values()} == named


def test_preemption_by_recomputing_although_there_is_a_cpu_pool() -> None:
    model = model_of(spec_of())
    requests = [request(f"r{i}", 9, 12) for i in range(4)]
    restored = {}
    for preemption_mode in ("recompute", "offload"):
        runner = runner_of(model, pages=14, offload="memory", preemption_mode=preemption_mode)
        ends = of(Finished, runner.stream(requests))
        restored[preemption_mode] = sum(end.restored_tokens for end in ends)
    assert restored["recompute"] == 0 < restored["offload"]


def test_a_schedule_is_a_value_of_an_experiment(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from workbench.scheduler.policies import FCFS\n\n\nclass Mine:\n"
        "    def __init__(self, step):\n        self.step = step\n"
        "    def __call__(self, state):\n        return FCFS()(state)\n"
    )
    text = "question: q\nworkload: {kind: random}\nschedule: {policy: fair, kind: static, chunk_tokens: 64}\n"
    experiment = Experiment.from_yaml(text)
    assert experiment.schedule.policy.kind == "fair" and Experiment.from_yaml(experiment.to_yaml()) == experiment
    own = experiment.with_(f"schedule.policy={{path: '{file}:Mine', arguments: {{step: 3}}}}").schedule.policy
    assert type(parse_policy(own)).__name__ == "Mine" and parse_policy(own).step == 3  # type: ignore[attr-defined]


def test_what_deciding_costs_can_be_asked() -> None:
    """Every step of the sixty-four that run is planned, by every policy, while others wait that do not fit."""
    for policy in BUILT_IN_POLICIES:
        spent = plan_cost.seconds(policy, 2)
        assert len(spent) == plan_cost.STEPS - plan_cost.WARM_UP_STEPS and min(spent) >= 0


@given(
    st.integers(65, 150),
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 32)), min_size=1, max_size=5),
    st.sampled_from([(32, 3, 24), (48, 4, 28)]),
)
@settings(max_examples=tries(60))
def test_short_prompts_have_their_turn_beside_a_long_one(
    long: int, arrivals: list[tuple[int, int]], step_tokens: tuple[int, int, int]
) -> None:
    """Some of each step's 32 prefill tokens (fewer where decodes take of them) are theirs. Each has its first token
    once these have held the short ones before it and itself, and the long one takes no longer than the others do."""
    most, share, rest = step_tokens
    line = Line("interleaved", max_num_seqs=6, max_num_batched_tokens=most, chunk_tokens=32)
    line.submit(long, most=1)
    steps = list(accumulate(gap for gap, _ in arrivals))
    left: dict[str, int] = {}  # tokens of each short prompt to compute
    due: dict[str, int] = {}  # the step that computes the last of them at the latest
    step, computed = 0, 0
    while computed < long:
        for prompt in [prompt for at, (_, prompt) in zip(steps, arrivals, strict=True) if at == step]:
            ahead = sum(left.values())
            name = line.submit(prompt, most=99)
            left[name], due[name] = prompt, step + -(-(ahead + prompt) // share) - 1
        for name, tokens in line.step().items():
            if name == "r0":
                computed += tokens
            else:
                left[name] = max(0, left[name] - tokens)  # then it decodes
        assert all(due[name] > step for name in left if left[name])
        step += 1
    assert step <= -(-long // rest)


def test_a_sequence_that_waits_for_another_is_not_the_long_one() -> None:
    """The first of two prompts has nothing to compute while the second is read."""

    def view(order: int, tokens: int, computed: int, is_running: bool) -> RequestView:
        return RequestView(str(order), order, 0, "", 0, tokens, tokens, computed, tokens - computed, is_running)

    waits, long, short = view(0, 4, 4, True), view(1, 99, 0, True), view(2, 3, 0, False)
    state = SchedulerState(
        0, (waits, long), (short,), (9,), {}, {}, {}, limits=SchedulerLimits(max_num_batched_tokens=16)
    )
    items = list(items_of(Interleaved()(state).order, "it", 3))
    assert items == [Turn(long, 14), short, long, waits, long, short]


def test_beside_many_decodes_a_prompt_is_long_that_would_fit_into_a_step() -> None:
    line = Line("interleaved", max_num_seqs=10, max_num_batched_tokens=32)
    for _ in range(8):
        line.submit(4)
    line.step()
    line.submit(27)
    line.submit(2)
    assert line.step() == {**{f"r{number}": 1 for number in range(8)}, "r8": 22, "r9": 2}


def test_a_scored_prompt_behind_a_scored_one_leaves_the_share_to_others() -> None:
    """A step has 128 tokens whose log-probabilities of a prompt it gives: the long one takes them all."""
    line = Line("interleaved", max_num_batched_tokens=144)
    scored = {"prompt_logprobs": 0}
    line.submit(190, 1, sampling=scored)
    line.submit(18, sampling=scored)
    line.submit(18)
    assert line.step() == {"r0": 126, "r2": 18}


def test_a_long_prompt_takes_the_share_that_no_short_one_can() -> None:
    line = Line("interleaved", max_num_seqs=1)
    line.submit(100)
    line.submit(2)
    assert line.step() == {"r0": 16}


def test_fcfs_lets_a_short_prompt_wait_for_a_long_one() -> None:
    """The order that `interleaved` changes: with it the short one is read at once."""
    steps = {}
    for policy in ("fcfs", "interleaved"):
        line = Line(policy)
        line.submit(100)
        line.submit(2)
        steps[policy] = next(step for step in range(20) if "r1" in line.step())
    assert steps == {"fcfs": 6, "interleaved": 0}


def test_a_prompt_that_cached_tokens_make_short_is_short() -> None:
    line = Line("interleaved", prefix=True)
    line.submit(60, most=1)
    while line.scheduler.has_unfinished_requests:
        line.step()
    line.submit(150, most=1, first=1000)
    line.submit(64)
    assert line.step() == {"r1": 14, "r2": 2}, "56 of its 64 tokens are in the cache"


def test_a_chunk_is_kept_to_after_a_preemption() -> None:
    """As many decodes were preempted as there are prefills: the requests that still run are not all decodes."""
    script = ["r0"], ["r0", "r1"], ["r2"], ["r3"], ["r2", "r3"]

    def scripted(state: SchedulerState) -> SchedulerDecision:
        requests = {entry.request_id: entry for entry in (*state.running, *state.waiting)}
        preempted = [requests["r0"], requests["r1"]] if state.step == 4 else []
        return SchedulerDecision([requests[name] for name in script[state.step]], preempted=preempted)

    line = Line(scripted, chunk_tokens=1)
    for prompt in (1, 1, 5, 5):
        line.submit(prompt)
    assert [line.step() for _ in script] == [{"r0": 1}, {"r0": 1, "r1": 1}, {"r2": 1}, {"r3": 1}, {"r2": 1}]


def test_running_requests_that_are_left_out_pause_unless_no_request_advances() -> None:
    line = Line(lambda state: SchedulerDecision([state.prefills, state.waiting]))
    for prompt in (8, 24):
        line.submit(prompt)
    assert [line.step() for _ in range(3)] == [{"r0": 8, "r1": 8}, {"r1": 16}, {"r0": 1, "r1": 1}]


def test_a_request_may_have_two_turns_in_a_step() -> None:
    line = Line(lambda state: SchedulerDecision([*(Turn(entry, 4) for entry in state.waiting), *state.waiting]))
    for prompt in (8, 7, 5):
        line.submit(prompt)
    assert line.step() == {"r0": 8, "r1": 4, "r2": 4}


def test_an_order_without_an_end_ends() -> None:
    line = Line(lambda state: SchedulerDecision(cycle([*state.running, *state.waiting])))
    line.submit(4)
    assert [line.step() for _ in range(2)] == [{"r0": 4}, {"r0": 1}]


def test_what_started_before_an_order_raises_is_reported_with_the_next_plan() -> None:
    """Nothing is lost: the request that the policy started runs on under another one."""

    def broken(state: SchedulerState) -> Iterator[RequestView]:
        yield state.waiting[0]
        raise KeyError("oh")

    line = Line(lambda state: SchedulerDecision(broken(state)))
    line.submit(5)
    with pytest.raises(WorkbenchError, match="raised KeyError: 'oh'; nothing was planned"):
        line.step()
    line.scheduler.set_policy(FCFS())
    assert line.step() == {"r0": 5} and line.said[0].startswith("r0 admitted")


STEPS, PATIENCE = 600, 20


def waits(line: Line, *streams: tuple[int, dict[str, Any]]) -> list[list[int]]:
    """Steps that the requests of each stream, one every so many steps, waited until they began; of the first half."""
    came: list[dict[str, int]] = [{} for _ in streams]
    began: dict[str, int] = {}
    for step in range(STEPS):
        for (every, asked), mine in zip(streams, came, strict=True):
            if step % every == 0:
                mine[line.submit(**{"prompt": 8, "most": 6, **asked})] = step
        for name in line.step():
            began.setdefault(name, step)
    return [[began.get(name, STEPS) - at for name, at in mine.items() if at < STEPS // 2] for mine in came]


@pytest.mark.parametrize(
    ("policy", "first", "later"),
    [
        (Priority, {"priority": 0}, {"priority": 5}),
        (Fair, {"tenant": "light"}, {"tenant": "heavy"}),
        (ShortestPrompt, {"prompt": 4}, {"prompt": 8}),
    ],
)
def test_the_first_goes_first_when_all_are_past_the_starvation_limit(policy: Any, first: dict, later: dict) -> None:
    """Half of what can be served goes first, and waits little; three quarters come besides, and wait for long."""
    line = Line(policy(starvation_limit=PATIENCE))
    soon, late = waits(line, (3, first), (2, later))
    assert all(line.scheduler._steps - sequence.arrival_step > PATIENCE for sequence in line.scheduler.waiting[:20])
    assert statistics.median(soon) * 4 < statistics.median(late)
    assert max(soon) < PATIENCE * 2


@pytest.mark.parametrize("policy", [Priority, ShortestPrompt])
def test_the_oldest_have_a_share_however_many_go_first(policy: Any) -> None:
    """More than can be served goes first: of what order of arrival has to give, the others get a fourth."""
    streams = (1, {"priority": 0, "prompt": 4}), (60, {"priority": 5})
    (_, others), (_, in_order) = (waits(Line(each), *streams) for each in (policy(starvation_limit=PATIENCE), FCFS()))
    assert all(mine <= PATIENCE + 4 * (theirs + 6) for mine, theirs in zip(others, in_order, strict=True))
