"""The law: what was recorded under one clock is formed again under another, step by step and bit by bit."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.own_rules import BACKWARDS
from tests.engine.tiny import CONTEXT, VOCAB, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.helpers.recorded import Changed
from tests.thorough import tries
from workbench.engine.replay import RecordedPolicy, ReplayDiverged, replay
from workbench.engine.replay_request import (
    OWN_END,
    RecordedEnd,
    ReplayWork,
    RequestReplay,
    ServedRequest,
    neighbours_of,
    request_of,
)
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import PrefixPin, Request
from workbench.scheduler.plan import StepPlan
from workbench.scheduler.policies import BUILT_IN_POLICIES
from workbench.speculative.proposers import PromptLookupProposer, Speculator
from workbench.trace.events import Event, Finished, StepPlanned
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
            replace(
                request(f"r{number}", prompt, most, seed=number, **{k: v for k, v in more.items() if k != "pins"}),
                arrival=arrival,
                pins=tuple(pin for pin in more.get("pins", ()) if pin.tokens <= prompt),
            )
            for number, (arrival, prompt, most, more) in enumerate(self.asked)
        ]

    def runner(self, clock: Clock, **changes: Any) -> Runner:
        drafts = Speculator(PromptLookupProposer(1, 3), 3, CONTEXT, "adaptive") if self.drafts else None
        made = runner_of(MODEL, **{**self.settings, **changes}, speculator=drafts, clock=clock, sleep=clock.sleep)
        if self.quick:
            made.core.executor = Made()  # type: ignore[assignment]
        return made


class Made:
    """An executor whose logits are made of the text before them, so that many traffics take little time."""

    compiles, kernel_seconds, artifacts, gathers_logits = 0, None, {}, False

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
    [
        {},
        {},
        {},
        {"temperature": 1.0},
        {"n": 2},
        {"temperature": 1.0, "n": 2, "best_of": 3},
        {"beams": 2},
        BACKWARDS,
        {"pins": (PrefixPin(8, 4.0),)},
    ]
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


def record(traffic: Traffic, clock: Clock, rows: list[torch.Tensor] | None = None) -> Recorder:
    recorder, runner = Recorder(), traffic.runner(clock)
    keep_rows(runner, rows)

    def note(event: Event) -> None:
        recorder.record(event)
        if len(recorder.events) in traffic.cancels and event.request_id:
            runner.cancel(event.request_id)

    runner.set_listener(note)
    for number, event in enumerate(runner.stream(traffic.requests())):
        if number in traffic.cancels and event.request_id:  # between two steps
            runner.cancel(event.request_id)
    return recorder


def keep_rows(runner: Runner, rows: list[torch.Tensor] | None) -> None:
    if rows is not None:
        Changed(runner, lambda plan, logits: rows.append(logits.clone()) or logits)


def again(traffic: Traffic, script: StepScript, clock: Clock, rows: list | None = None, **changes: Any) -> Recorder:
    recorder, runner = Recorder(), traffic.runner(clock, **changes)
    keep_rows(runner, rows)
    runner.set_listener(recorder.record)
    for _ in replay(runner, traffic.requests(), script):
        pass
    assert runner.scheduler.pages_in_use == 0 and not isinstance(runner.scheduler.policy, RecordedPolicy)
    return recorder


def ends(recorder: Recorder) -> list[tuple]:
    return [
        (event.request_id, event.sample, event.reason, event.token_ids, event.cached_tokens, event.pinned)
        for event in of(Finished, recorder.events)
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
    """Steps, ends and logits, bit for bit; cached pages live as long as they did."""
    rows = list[torch.Tensor](), list[torch.Tensor]()
    before = record(traffic, Clock(traffic.seed, pace), rows[0])
    script = StepScript.from_recorder(before)
    after = again(traffic, script, Clock(traffic.seed + 1, other), rows[1])
    assert StepScript.from_recorder(after).same_as(script)
    assert ends(after) == ends(before)
    assert len(rows[0]) == len(rows[1]) and all(map(torch.equal, *rows))


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


def test_the_other_policys_batches_are_followed() -> None:
    """The decisions are the record's: a policy that would decide otherwise is not asked."""
    script = StepScript.from_recorder(record(busy(), Clock(1, 0.2)))
    after = StepScript.from_recorder(again(busy(), script, Clock(2, 0.2), policy="shortest_prompt"))
    assert [step.spans for step in after.steps] == [step.spans for step in script.steps]


def test_what_cannot_be_followed_says_where_and_why() -> None:
    traffic = busy()
    script = StepScript.from_recorder(record(traffic, Clock(1, 0.2)))
    with pytest.raises(
        ReplayDiverged, match=r"replay: step \d+ (differs from the record|cannot be formed): .*(pages|tokens)"
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


class Alike(Traffic):
    """Requests whose prompts begin alike, so that the cache has them."""

    def requests(self) -> list[Request]:
        made = super().requests()
        longest = max((each.prompt_ids for each in made), key=len)
        return [replace(each, prompt_ids=longest[: len(each.prompt_ids)]) for each in made]


def replayed(traffic: Traffic, before: Recorder, name: str, forget: tuple[str, ...] = ()) -> RequestReplay:
    """Run one request again as a server would: on a fresh cache, with whom it shared steps with, by no clock."""
    ended: dict[str, list[RecordedEnd]] = {}
    for event in of(Finished, before.events):
        ended.setdefault(event.request_id, []).append(RecordedEnd(event.sample, event.reason, event.token_ids))
    asked = {each.request_id: each for each in traffic.requests()}
    served = {key: ServedRequest(each, (*ended.get(key, ()),)) for key, each in asked.items() if key not in forget}
    runner = traffic.runner(Clock(0, 1.0))
    work = ReplayWork(runner.config, served, of(StepPlanned, before.events), [name], runner.loaded_model)
    work.runner.core.executor = runner.core.executor if traffic.quick else work.runner.core.executor
    found = work.run()
    assert not work.runner.has_unfinished_requests and work.runner.scheduler.pages_in_use == 0
    return found


def test_what_was_preempted_and_found_in_the_cache_is_so_again() -> None:
    """Tokens that a preempted request found again are computed before its step; what shared no step is left out."""
    given = {**vars(busy()), "settings": {**busy().settings, "prefix": "radix"}, "cancels": (), "quick": True}
    traffic = Alike(**given)
    before = record(traffic, Clock(1, 0.2))
    actions = [action for step in StepScript.from_recorder(before).steps for _, action in step.effects]
    names = in_steps(before)
    found = {name: replayed(traffic, before, name) for name in names}
    remarks = {name: " ".join(each.remarks) for name, each in found.items()}
    assert "preempted" in actions and all(each.identical for each in found.values())
    assert not any("not as recorded" in each for each in remarks.values()), remarks
    assert any("had found in a cache were computed before" in each for each in remarks.values())
    assert any("shared steps with neighbours alone" in each for each in remarks.values())
    alone = replayed(traffic, before, names[0], forget=(names[1],))
    assert alone.identical and f"{names[1]} is not kept" in " ".join(alone.remarks)
    assert f"{names[0]}: identical tokens" in str(alone) and "steps" in alone._repr_html_()


def test_a_cut_beam_is_compared_as_it_was_then() -> None:
    """A cancel in the midst of a step, at whose end a beam may go on with the other one's tokens, or have its text."""
    settings = {"pages": 20, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    cut = 0
    for number in range(6, 40):
        traffic = Traffic(((0.0, 11, 9, {"beams": 2}),), settings, (number,), seed=1, quick=True)
        before = record(traffic, Clock(1, 0.05))
        found = replayed(traffic, before, "r0")
        assert found.identical, str(found)
        cut += any(each.is_cut and each.tokens for each in found.samples)
    assert cut


def test_what_was_not_answered_is_not_replayed() -> None:
    traffic = replace(busy(), quick=True)
    before = record(traffic, Clock(1, 0.2))
    with pytest.raises(WorkbenchError, match="request 'r0' was in no step; replay one that was answered"):
        short = Recorder()
        short.events = [event for event in before.events if not isinstance(event, StepPlanned)]
        replayed(traffic, short, "r0")
    with pytest.raises(WorkbenchError, match="request 'r0' has not ended; replay one"):
        short.events = [event for event in before.events if event.request_id != "r0"]
        replayed(traffic, short, "r0")


def in_steps(before: Recorder) -> list[str]:
    return sorted({request_of(span.sequence) for event in of(StepPlanned, before.events) for span in event.spans})


@settings(max_examples=tries(30))
@given(TRAFFIC, PACE, st.data())
def test_a_request_comes_back_among_its_neighbours(traffic: Traffic, pace: float, data: st.DataObject) -> None:
    """Whatever the cache held and whichever others ran: its steps have the recorded spans, all of them their tokens."""
    traffic = Alike(**{**vars(traffic), "quick": True})
    before = record(traffic, Clock(traffic.seed, pace))
    name = data.draw(st.sampled_from(in_steps(before) or [""]))
    if name:
        found = replayed(traffic, before, name)
        names = {each.request_id for each in found.samples if each.is_neighbour}
        assert names == neighbours_of([name], of(StepPlanned, before.events)) and found.identical, str(found)
        names = {span.sequence for step in found.steps for span in step.spans}
        sole = names == {*map(request_of, names)}  # further sequences of a request join where a slot is free now
        assert not sole or not any("not as recorded" in each for each in found.remarks), str(found)
        ends = {(e.request_id, e.sample): e for e in of(Finished, before.events)}
        for each in found.samples:
            end = ends[each.request_id, each.sample]
            assert (each.tokens, each.is_cut) == (len(end.token_ids), end.reason not in OWN_END)
