"""A schedule that is changed between steps: tokens stay, limits hold from the next step on, mistakes change nothing."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import model_of, runner_of, spec_of
from tests.helpers.events import of
from tests.thorough import tries
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.scheduler.policies import parse_policy
from workbench.scheduler.policy import SchedulerDecision, SchedulerState
from workbench.trace.events import Event, Finished, Preempted, SettingsChanged, Stepped, StepPlanned

SPEC = spec_of().model_copy(update={"max_position_embeddings": 512})
DOUBLE = model_of(SPEC, dtype=torch.float64)  # what a batch rounds differently decides no token
ENGINE: dict[str, Any] = {"page_size": 16, "pages": 60, "max_num_seqs": 6, "max_num_batched_tokens": 128}
POLICIES = ("fcfs", "prefill_first", "decode_first", "shortest_prompt", "priority", "fair", "deadline")
CHANGES = st.one_of(
    st.sampled_from(POLICIES).map(lambda name: {"policy": name}),
    st.integers(1, 128).map(lambda tokens: {"chunk_tokens": tokens}),
    st.integers(1, 6).map(lambda count: {"max_num_seqs": count}),
    st.sampled_from(["continuous", "static", "padded"]).map(lambda kind: {"kind": kind}),
)


def runner_with(events: list[Event], **changed: Any) -> Runner:
    return runner_of(DOUBLE, **ENGINE | changed, listener=events.append)


def asked(name: str, prompt: int, output: int, **more: Any) -> Request:
    sampling = SamplingParameters(max_tokens=output, ignore_eos=True)
    return Request(name, tuple(number % 31 for number in range(prompt)), sampling, **more)


def tokens_of(runner: Runner, requests: list[Request], moves: dict[int, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tokens of each request, one of which comes before each step; changes are made before steps."""
    events: list[Event] = []
    runner.set_listener(events.append)
    runner.set_schedule(policy="fcfs", kind="continuous", chunk_tokens=16, max_num_seqs=ENGINE["max_num_seqs"])
    step = 0
    while step < len(requests) or runner.has_unfinished_requests:
        if step < len(requests):
            runner.submit(requests[step])
        runner.set_schedule(**moves.get(step, {}))
        runner.step()
        step += 1
    assert not any(pool.num_used for pool in runner.scheduler.pools)
    return {each.request_id: each.token_ids for each in of(Finished, events)}


@settings(max_examples=tries(40))
@given(st.dictionaries(st.integers(0, 30), CHANGES, max_size=8), st.integers(0, 9))
def test_changes_lose_no_request_and_leave_its_tokens(changes: dict[int, dict[str, Any]], seed: int) -> None:
    draw = random.Random(seed)
    requests = [
        Request(f"r{number}", tuple(draw.choices(range(31), k=draw.randint(1, 90))),
                SamplingParameters(max_tokens=draw.randint(1, 12), temperature=0)) for number in range(8)
    ]  # fmt: skip
    runner = runner_with([], pages=16)  # few: requests are preempted
    plain = tokens_of(runner, requests, {})
    assert len(plain) == len(requests) and tokens_of(runner, requests, changes) == plain


def test_limits_hold_from_the_next_step_on() -> None:
    events: list[Event] = []
    runner = runner_with(events)
    for number in range(6):
        runner.submit(asked(f"r{number}", 30, 12))
    for _ in range(4):
        runner.step()
    assert len(runner.scheduler.running) == 6
    runner.set_schedule(max_num_seqs=2, chunk_tokens=16)
    runner.step()
    assert len(runner.scheduler.running) > 2, "those that run go on"
    events.clear()
    for number in range(3):
        runner.submit(asked(f"later{number}", 60, 2))
    most = 0
    while runner.has_unfinished_requests:
        runner.step()
        running = [each.request_id for each in runner.scheduler.running]
        most = max(most, len(running)) if all(name.startswith("later") for name in running) else most
    prefills = [step.prefill_tokens for step in of(Stepped, events)]
    assert max(prefills) == 16 and sum(prefills) == 3 * 60 and most == 2
    runner.set_schedule(max_num_seqs=3)
    runner.submit(Request("samples", tuple(range(30)), SamplingParameters(max_tokens=8, n=5, ignore_eos=True)))
    while runner.has_unfinished_requests:
        runner.step()
        assert len(runner.scheduler.running) <= 3


def test_a_policy_sees_the_limits_and_a_change_is_an_event() -> None:
    events: list[Event] = []
    runner, seen, fcfs = runner_with(events), set[tuple[int, int]](), parse_policy("fcfs")

    def watching(state: SchedulerState) -> SchedulerDecision:
        seen.add((state.limits.max_num_seqs, state.limits.max_chunk_tokens))
        return fcfs(state)

    runner.scheduler.set_policy(watching)
    runner.set_schedule(max_num_seqs=3, chunk_tokens=24)
    runner.submit(asked("a", 30, 8))
    while runner.has_unfinished_requests:
        runner.step()
    assert seen == {(3, 24)}
    events.clear()
    runner.set_schedule(policy="priority", chunk_tokens=None)
    changed = [(each.name, each.old, each.new) for each in of(SettingsChanged, events)]
    assert changed == [("policy", "interleaved", "priority"), ("chunk_tokens", "24", "none")]


def test_running_requests_keep_their_pages_in_the_new_policys_order() -> None:
    """They are asked for when pages run out."""
    events: list[Event] = []
    runner = runner_with(events, pages=7)
    for number, priority in enumerate((2, 0, 1)):
        runner.submit(asked(f"r{number}", 20, 60, priority=priority))
    runner.submit(asked("waits", 20, 4, priority=9))
    for _ in range(4):
        runner.step()
    events.clear()
    runner.set_schedule(policy="priority")
    runner.step()
    while not (gone := [each.request_id for each in of(Preempted, events)]):
        runner.step()
    keep = [decision.keep for planned in of(StepPlanned, events) for decision in planned.policy_decisions]
    assert [each for each in keep if each] == [("r1", "r2", "r0")]
    assert gone[0] == "r0", "the largest number is preempted first"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_num_seqs": 7}, "made for 6"),
        ({"max_num_batched_tokens": 129}, "made for 128"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": 500}, "chunk_tokens must be from 1 to"),
        ({"policy": "fcsf"}, "policy"),
        ({"chunk": 4}, "did you mean 'chunk_tokens'"),
        ({"preemption_mode": "recompute"}, "fixed once"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 16}, "r0: 40 prompt tokens"),
    ],
)
def test_a_change_that_cannot_be_made_changes_nothing(change: dict[str, Any], words: str) -> None:
    runner = runner_with([])
    runner.submit(asked("r0", 40, 4))
    runner.step()
    before = runner.schedule, runner.scheduler.limits, runner.scheduler.policy
    with pytest.raises(WorkbenchError, match=re.escape(words)):
        runner.set_schedule(**change)
    assert (runner.schedule, runner.scheduler.limits, runner.scheduler.policy) == before
