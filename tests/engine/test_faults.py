"""A request that fails ends alone, on the real runner: the others' tokens are unchanged, and at rest every page
is free or in the prefix index."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.at_rest import at_rest
from tests.engine.tiny import finals, layer, model_of, request, runner_of, spec_of
from tests.thorough import tries
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.request import CustomPart, Request
from workbench.scheduler.policies import BUILT_IN_POLICIES
from workbench.scheduler.policy import SchedulerDecision, SchedulerState
from workbench.speculative.proposers import PromptLookupProposer, Speculator
from workbench.trace.events import Event, Finished, Scheduled, Submitted

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))


class Raising:
    """A user's sampler that breaks at its third token."""

    def start(self) -> int:
        return 0

    def choose(self, logits: Tensor, uniform: float, state: int) -> tuple[int, int]:
        if state == 2:
            raise RuntimeError("no more")
        return int(logits.argmax()), state + 1


RAISING = CustomPart(path="tests.engine.test_faults:Raising")


def failing(runner: Runner, fails, error: Exception) -> None:
    """Every forward that computes a span of which `fails` says so raises."""
    forward = runner.executor.forward

    def computed(plan):
        if any(fails(span) for span in plan.spans):
            raise error
        return forward(plan)

    runner.executor.forward = computed  # type: ignore[method-assign]


def test_an_allocation_that_fails_once_ends_no_request() -> None:
    requests = [request(f"r{i}", 5 + i, 6) for i in range(4)]
    alone, runner, calls = finals(runner_of(MODEL), requests), runner_of(MODEL), iter(range(1000))
    failing(runner, lambda span: next(calls) == 9, RuntimeError("out of memory"))
    assert finals(runner, requests) == alone
    at_rest(runner)


def test_beams_end_together() -> None:
    requests = [request("r0", 6, 5), request("beams", 5, 5, beams=3, n=2, temperature=1.0)]
    alone = finals(runner_of(MODEL), requests[:1])
    runner = runner_of(MODEL)
    failing(runner, lambda span: span.sequence.request_id == "beams#1" and span.end > 6, MemoryError("no room"))
    done = generate(runner, requests)
    assert {done[name].reason for name in done if name != "r0"} == {"error"}
    assert done["r0"].token_ids == alone["r0"]
    at_rest(runner)


def test_a_wrong_wish_ends_the_request_it_names() -> None:
    requests = [request(f"r{i}", 5 + i, 6) for i in range(3)]
    alone = finals(runner_of(MODEL), requests)

    def wrong(state: SchedulerState) -> SchedulerDecision:
        scheduled = [(entry.request_id, min(entry.num_new_tokens, 4)) for entry in (*state.running, *state.waiting)]
        if state.step == 3:
            scheduled = [(name, -1 if name == "r1" else tokens) for name, tokens in scheduled] + [("unknown", 1)]
        return SchedulerDecision(scheduled)

    events: list[Event] = []
    runner = runner_of(MODEL, policy=wrong, listener=events.append)
    done = generate(runner, requests)
    assert done["r1"].reason == "error" and "schedules -1 tokens for r1" in done["r1"].error
    assert {name: done[name].token_ids for name in ("r0", "r2")} == {name: alone[name] for name in ("r0", "r2")}
    assert any("neither runs nor waits" in getattr(event, "reason", "") for event in events)
    at_rest(runner)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ((["r0"], 1), r"entry 3 is for \['r0'\], which neither runs nor waits"),
        ((("r0", []), 1), "entry 3 is for .*, which neither runs nor waits"),
        (("r0", math.inf), r"entry 3 is \('r0', inf\), must be \(id, tokens\)"),
        ({"r0": 1}, r"entry 3 is \{'r0': 1\}, must be \(id, tokens\)"),
    ],
)
def test_an_entry_that_names_no_request_is_left_out(entry: Any, error: str) -> None:
    requests = [request(f"r{i}", 5 + i, 6) for i in range(3)]
    alone = finals(runner_of(MODEL), requests)

    def odd(state: SchedulerState) -> SchedulerDecision:
        scheduled = [(view.request_id, min(view.num_new_tokens, 4)) for view in (*state.running, *state.waiting)]
        unhashable: Any = ["r1"]
        return SchedulerDecision([*scheduled, entry], [unhashable])

    events: list[Event] = []
    assert finals(runner_of(MODEL, policy=odd, listener=events.append), requests) == alone
    reasons = [event.reason for event in events if isinstance(event, Scheduled)]
    assert any(re.search(error, reason) for reason in reasons)
    assert any("entry 0 preempts ['r1'], which does not run" in reason for reason in reasons)


def test_reasons_are_a_mapping() -> None:
    wrong: Any = ["too late"]
    runner = runner_of(MODEL, policy=lambda state: SchedulerDecision((), (), wrong))
    with pytest.raises(WorkbenchError, match=r"reasons is \['too late'\], must be \{id: reason\}"):
        generate(runner, [request("r0", 5, 6)])


@pytest.mark.parametrize("kind", ["submitted", "scheduled", "prefilled", "decoded", "verified", "preempted"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_listener_cancels_the_request_of_an_event(kind: str, n: int) -> None:
    """In the midst of a step or of a submission: it ends once, no event follows for it, the others go on."""
    asked = [request("r0", 6, 12), request("r1", 9, 12, n=n), request("r2", 12, 9), request("r3", 15, 12, n=n)]
    alone = finals(runner_of(MODEL, pages=80), asked)
    runner = runner_of(
        MODEL, pages=14, speculator=Speculator(PromptLookupProposer(1, 2), 3, MODEL.spec.max_position_embeddings)
    )
    events: list[Event] = []

    def heard(event: Event) -> None:
        events.append(event)
        if event.kind == kind and event.request_id != "r0":
            runner.cancel(event.request_id)

    runner.set_listener(heard)
    done = generate(runner, asked)
    assert any(end.reason == "cancelled" for end in done.values())
    for name, end in done.items():
        cut = end.reason == "cancelled"
        assert end.token_ids == alone[name][: len(end.token_ids) if cut else None]
        mine = [event for event in events if (event.request_id, event.sample) == (end.request_id, end.sample)]
        assert [event.kind for event in mine].count("finished") == 1 and mine[-1].kind == "finished"
        assert mine[0].kind == "submitted"
    at_rest(runner)


def test_a_policy_that_raises_ends_no_request() -> None:
    """The step is not planned; with another policy everything goes on from where it was."""
    requests = [request(f"r{i}", 5 + i, 6) for i in range(3)]
    alone = finals(runner_of(MODEL), requests)

    def broken(state: SchedulerState) -> SchedulerDecision:
        raise KeyError("oh")

    runner, ends = runner_of(MODEL), {}
    for each in requests:
        runner.submit(each)

    def heard(event: Event) -> None:
        if isinstance(event, Finished):
            ends[event.request_id] = event

    runner.set_listener(heard)
    runner.step()
    right = runner.scheduler.policy
    runner.scheduler.set_policy(broken)
    for _ in range(2):
        with pytest.raises(WorkbenchError, match="policy .*broken: raised KeyError: 'oh'; nothing was planned"):
            runner.step()
    runner.scheduler.set_policy(right)
    while runner.has_unfinished_requests:
        runner.step()
    assert {name: event.token_ids for name, event in ends.items()} == alone
    at_rest(runner)


WORDS = {"sampler": "no more", "nan": "NaN", "memory": "MemoryError: full"}


@given(
    seed=st.integers(0, 10**6), policy=st.sampled_from([*BUILT_IN_POLICIES]),
    kind=st.sampled_from(["continuous", "static"]),
    pages=st.sampled_from([14, 40]), prefix=st.sampled_from(["off", "radix"]),
)  # fmt: skip
@settings(max_examples=tries(40), deadline=None)
def test_histories_with_faults(seed: int, policy: str, kind: str, pages: int, prefix: str) -> None:
    """Requests that break in every way, that are cancelled, and that are well, under any policy: the last are as alone,
    and every request has one end with one reason."""
    from workbench.scheduler.policies import parse_policy

    draw = random.Random(seed)
    ways = [draw.choice(["well", "well", "sampler", "nan", "memory", "cancelled"]) for _ in range(6)]
    requests: list[Request] = []
    for number, way in enumerate(ways):
        own = {"temperature": 1.0, "sampler": RAISING} if way == "sampler" else {}
        n = draw.choice([1, 1, 2]) if way == "well" else 1
        requests.append(request(f"{way} {number}", draw.randrange(2, 14), draw.randrange(3, 8), n=n, **own))
    well = [each for each in requests if each.request_id.startswith("well")]
    alone = finals(runner_of(MODEL), well)
    runner = runner_of(MODEL, pages=pages, prefix=prefix, policy=parse_policy(policy, kind))  # type: ignore[arg-type]
    failing(
        runner, lambda span: span.sequence.request_id.startswith("memory") and span.needs_sample, MemoryError("full")
    )
    forward = runner.executor.forward

    def with_nan(plan):
        rows = forward(plan).clone()
        for row, span in enumerate(span for span in plan.spans if span.needs_sample):
            if span.sequence.request_id.startswith("nan"):
                rows[row] = torch.nan
        return rows

    runner.executor.forward = with_nan  # type: ignore[method-assign]
    ends: dict[tuple[str, int], Finished] = {}
    began = 0
    for count, event in enumerate(runner.stream(requests)):
        began += isinstance(event, Submitted)
        if isinstance(event, Finished):
            assert (event.request_id, event.sample) not in ends, "two ends"
            ends[event.request_id, event.sample] = event
        if count % 5 == 4:
            for each in requests:
                if each.request_id.startswith("cancelled") and draw.random() < 0.5:
                    runner.cancel(each.request_id)
    assert len(ends) == began == sum(each.sampling.n for each in requests)
    for (name, sample), event in ends.items():
        way = name.split()[0]
        if way == "well":
            assert event.token_ids == alone[name if not sample else f"{name}#{sample}"] and event.reason == "length"
        elif way == "cancelled":
            assert event.reason in ("cancelled", "length")
        else:
            assert event.reason == "error" and WORDS[way] in event.error
            assert way != "sampler" or len(event.token_ids) == 2
    at_rest(runner)
