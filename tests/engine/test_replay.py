"""The law: what was recorded under one clock is formed again under another, step by step and bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import CONTEXT, VOCAB, model_of, request, runner_of, spec_of
from tests.thorough import tries
from workbench.engine.replay import RecordedPolicy, ReplayDiverged, replay
from workbench.engine.runner import Runner
from workbench.request import Request
from workbench.scheduler.plan import StepPlan
from workbench.scheduler.policies import BUILT_IN_POLICIES
from workbench.speculative.proposers import PromptLookupProposer, Speculator
from workbench.trace.events import Decoded, Event, Finished
from workbench.trace.recorder import Recorder
from workbench.trace.script import RecordedAction, StepScript

MODEL = model_of(spec_of())


class Clock:
    """Time goes on by as much as it likes, each time it is looked at."""

    def __init__(self, seed: int, pace: float):
        self.draw, self.pace, self.now = random.Random(seed), pace, 100.0

    def __call__(self) -> float:
        self.now += self.draw.random() * self.pace
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 50 * seconds


@dataclass(frozen=True)
class Traffic:
    """Requests, on what runner they run, and who is cancelled when; `quick` is without a model."""

    asked: tuple[tuple[float, int, int, dict], ...]  # arrival, prompt, output, sampling
    settings: dict
    cancels: tuple[int, ...]  # at the so many-th event, of whom it concerns
    seed: int
    drafts: bool = False
    quick: bool = False

    def requests(self) -> list[Request]:
        return [
            replace(request(f"r{number}", prompt, most, seed=number, **sampling), arrival=arrival)
            for number, (arrival, prompt, most, sampling) in enumerate(self.asked)
        ]

    def runner(self, clock: Clock, **changes: Any) -> Runner:
        drafts = Speculator(PromptLookupProposer(1, 3), 3, CONTEXT, "adaptive") if self.drafts else None
        made = runner_of(MODEL, **{**self.settings, **changes}, speculator=drafts, clock=clock, sleep=clock.sleep)
        if self.quick:
            made.executor = Made()  # type: ignore[assignment]
        return made


class Made:
    """An executor whose logits are made of the text before them, so that many traffics take little time."""

    compiles, kernel_seconds, artifacts = 0, None, MappingProxyType({})

    def forward(self, plan: StepPlan) -> torch.Tensor:
        texts = [
            (*span.sequence.token_ids, *span.draft_token_ids[:place])
            for span in plan.spans
            if span.needs_sample
            for place in range(len(span.draft_token_ids) + 1)
        ]
        rows = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(text) % 2**31)) for text in texts]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


SAMPLING = st.sampled_from(
    [{}, {}, {}, {"temperature": 1.0}, {"n": 2}, {"temperature": 1.0, "n": 2, "best_of": 3}, {"beams": 2}]
)
SETTINGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(3, 4),
        "max_num_batched_tokens": st.sampled_from([7, 16]),
        "pages": st.integers(9, 20),
        "policy": st.sampled_from([*BUILT_IN_POLICIES]),
        "prefix": st.sampled_from(["off", "radix", {"kind": "radix", "ttl": 2.0}]),
        "offload": st.sampled_from(["none", "memory"]),
    }
)
TRAFFIC = st.builds(
    Traffic,
    st.lists(st.tuples(st.floats(0, 12), st.integers(1, 14), st.integers(1, 9), SAMPLING), min_size=1, max_size=6).map(
        tuple
    ),
    SETTINGS,
    st.lists(st.integers(0, 120), max_size=2).map(tuple),
    st.integers(0, 9),
)


def record(traffic: Traffic, clock: Clock) -> Recorder:
    recorder, runner = Recorder(), traffic.runner(clock)

    def note(event: Event) -> None:
        recorder.record(event)
        if len(recorder.events) in traffic.cancels and event.request_id:
            runner.cancel(event.request_id)

    runner.set_listener(note)
    for number, event in enumerate(runner.stream(traffic.requests())):
        if number in traffic.cancels and event.request_id:  # between two steps
            runner.cancel(event.request_id)
    return recorder


def again(traffic: Traffic, script: StepScript, clock: Clock, **changes: Any) -> Recorder:
    recorder, runner = Recorder(), traffic.runner(clock, **changes)
    runner.set_listener(recorder.record)
    for _ in replay(runner, traffic.requests(), script):
        pass
    assert runner.scheduler.pages_in_use == 0 and not isinstance(runner.scheduler.policy, RecordedPolicy)
    return recorder


def ends(recorder: Recorder) -> list[tuple]:
    return [
        (event.request_id, event.sample, event.reason, event.token_ids, event.cached_tokens)
        for event in recorder.events
        if isinstance(event, Finished)
    ]


PACE = st.floats(0.001, 1.0)


@settings(max_examples=tries(30))
@given(TRAFFIC, st.booleans(), PACE, PACE)
def test_what_was_recorded_comes_back(traffic: Traffic, drafts: bool, pace: float, other: float) -> None:
    comes_back(replace(traffic, drafts=drafts, quick=True), pace, other)


@settings(max_examples=tries(6))
@given(TRAFFIC, st.booleans(), PACE, PACE)
def test_what_a_model_said_comes_back(traffic: Traffic, drafts: bool, pace: float, other: float) -> None:
    comes_back(replace(traffic, drafts=drafts), pace, other)


def comes_back(traffic: Traffic, pace: float, other: float) -> None:
    before = record(traffic, Clock(traffic.seed, pace))
    script = StepScript.from_recorder(before)
    after = again(traffic, script, Clock(traffic.seed + 1, other))
    assert StepScript.from_recorder(after).same_as(script)
    assert ends(after) == ends(before)


def busy() -> Traffic:
    """Requests that are truncated, preempted and admitted late."""
    asked = tuple((number * 0.7, 9 + number, 8, {}) for number in range(6))
    return Traffic(asked, {"pages": 11, "max_num_batched_tokens": 7, "prefix": {"kind": "radix", "ttl": 1.0}}, (40,), 3)


def test_the_law_is_about_something() -> None:
    """The traffic has what makes a replay hard, and without the script another clock forms other steps."""
    before = StepScript.from_recorder(record(busy(), Clock(1, 0.2)))
    done = {action for step in before.steps for _, action in step.effects}
    assert done == {"admitted", "cut", "preempted"} and any(each.kind == "cancelled" for each in before.inputs)
    assert not StepScript.from_recorder(record(busy(), Clock(1, 0.02))).same_as(before)
    assert StepScript.from_recorder(again(busy(), before, Clock(1, 0.02))).same_as(before)


def test_cached_pages_live_as_long_as_they_did() -> None:
    """On a clock so slow that nothing expires, then on one on which everything would have."""
    asked = ((0.0, 12, 3, {}), (20.0, 12, 3, {}), (40.0, 12, 3, {}))
    traffic = Traffic(asked, {"prefix": {"kind": "radix", "ttl": 60.0}}, (), 0, quick=True)
    same = traffic.requests()[0].prompt_ids
    requests = [replace(each, prompt_ids=same) for each in traffic.requests()]
    before, first = Recorder(), traffic.runner(Clock(1, 0.001))
    first.telemetry.listener = before.record
    list(first.stream(requests))
    after, second = Recorder(), traffic.runner(Clock(2, 500.0))
    second.telemetry.listener = after.record
    list(replay(second, requests, StepScript.from_recorder(before)))
    assert ends(after) == ends(before) and [end[-1] for end in ends(before)] == [0, 8, 8]


def test_a_cancelling_listener_is_heard_in_the_midst_of_a_step() -> None:
    """Two decode together; at the first's third token the second is cancelled; its token of the step is not emitted."""
    traffic = Traffic(((0.0, 4, 8, {}), (0.0, 4, 8, {})), {}, (), 0, quick=True)
    before, runner = Recorder(), traffic.runner(Clock(1, 0.1))

    def note(event: Event) -> None:
        before.record(event)
        if isinstance(event, Decoded) and (event.request_id, event.index) == ("r0", 2):
            runner.cancel("r1")

    runner.set_listener(note)
    list(runner.stream(traffic.requests()))
    indices = [event.index for event in before.events if isinstance(event, Decoded) and event.request_id == "r1"]
    after = again(traffic, StepScript.from_recorder(before), Clock(2, 0.3))
    assert indices == [0, 1]
    assert indices == [event.index for event in after.events if isinstance(event, Decoded) and event.request_id == "r1"]


def test_logits_are_the_same_bit_for_bit() -> None:
    def rows(play: Callable[[Runner], object], clock: Clock) -> list[torch.Tensor]:
        runner, kept = busy().runner(clock), []
        forward = runner.executor.forward
        runner.executor.forward = lambda plan: kept.append(forward(plan)) or kept[-1]  # type: ignore[method-assign]
        play(runner)
        return kept

    recorder = Recorder()

    def first(runner: Runner) -> None:
        runner.set_listener(recorder.record)
        list(runner.stream(busy().requests()))

    before = rows(first, Clock(1, 0.2))
    script = StepScript.from_recorder(recorder)
    after = rows(lambda runner: list(replay(runner, busy().requests(), script)), Clock(7, 0.9))
    assert len(before) == len(after) > 10
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_the_other_policys_batches_are_followed() -> None:
    """The decisions are the record's: a policy that would decide otherwise is not asked."""
    script = StepScript.from_recorder(record(busy(), Clock(1, 0.2)))
    after = StepScript.from_recorder(again(busy(), script, Clock(2, 0.2), policy="shortest_prompt"))
    assert [step.spans for step in after.steps] == [step.spans for step in script.steps]


def test_what_cannot_be_followed_says_where_and_why() -> None:
    traffic = busy()
    script = StepScript.from_recorder(record(traffic, Clock(1, 0.2)))
    with pytest.raises(
        ReplayDiverged, match=r"replay: step \d+ (is not what it was|cannot be formed): .*(pages|tokens)"
    ):
        again(traffic, script, Clock(1, 0.2), pages=7)
    fewer = replace(traffic, asked=traffic.asked[:2])
    with pytest.raises(ReplayDiverged, match=r"before step \d+ the record submits r2, which this workload lacks"):
        again(fewer, script, Clock(1, 0.2))
    cut = replace(script, steps=script.steps[:-3])
    with pytest.raises(ReplayDiverged, match="the record ends here, and requests still go on"):
        again(traffic, cut, Clock(1, 0.2))


def test_an_altered_record_is_not_followed() -> None:
    """Each kind of change is seen at its own step: a span, a wish, a decision, an input."""
    traffic = busy()
    script = StepScript.from_recorder(record(traffic, Clock(1, 0.2)))
    place = next(i for i, step in enumerate(script.steps) if len(step.spans) > 2 and i > 4)
    step = script.steps[place]
    longer = replace(step, spans=(step.spans[0]._replace(tokens=step.spans[0].tokens + 1), *step.spans[1:]))
    undecided = replace(step, actions=(*step.actions, RecordedAction("r0", "admitted", "")))
    for wrong in (longer, undecided):
        changed = replace(script, steps=(*script.steps[:place], wrong, *script.steps[place + 1 :]))
        with pytest.raises(ReplayDiverged, match=rf"step {step.number}\b"):
            again(traffic, changed, Clock(1, 0.2))


def test_a_failed_replay_leaves_the_runner_as_it_was() -> None:
    traffic = busy()
    script = StepScript.from_recorder(record(traffic, Clock(1, 0.2)))
    runner = traffic.runner(Clock(1, 0.2), pages=7)
    policy = runner.scheduler.policy
    with pytest.raises(ReplayDiverged):
        list(replay(runner, traffic.requests(), script))
    assert (
        runner.scheduler.policy is policy and runner.scheduler.pages_in_use == 0 and not runner.has_unfinished_requests
    )
    assert len(list(runner.stream([request("z", 3, 2)]))) > 0
