"""A request that fails ends alone, on the real runner: the others' tokens are unchanged, and at rest every page
is free or in the prefix index."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.at_rest import at_rest
from tests.engine.tiny import finals, layer, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.helpers.recorded import Changed
from tests.thorough import tries
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.request import CustomPart, Request
from workbench.scheduler.plan import StepPlan
from workbench.scheduler.policies import BUILT_IN_POLICIES, parse_policy
from workbench.scheduler.policy import SchedulerDecision, SchedulerState, Turn
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
    forward = runner.core.executor.forward

    def computed(plan):
        if any(fails(span) for span in plan.spans):
            raise error
        return forward(plan)

    runner.core.executor.forward = computed  # type: ignore[method-assign]


def test_an_allocation_that_fails_once_ends_no_request() -> None:
    requests = [request(f"r{i}", 5 + i, 6) for i in range(4)]
    alone, runner, calls = finals(runner_of(MODEL), requests), runner_of(MODEL), iter(range(1000))
    failing(runner, lambda span: next(calls) == 9, RuntimeError("out of memory"))
    assert finals(runner, requests) == alone
    at_rest(runner)


@pytest.mark.parametrize("error", ["MemoryError: no room", "NaN"])
def test_beams_end_together(error: str) -> None:
    """A step of one of them fails, or its row is not a number."""
    requests = [request("r0", 6, 5), request("beams", 5, 5, beams=3, n=2, temperature=1.0)]
    alone = finals(runner_of(MODEL), requests[:1])

    def broken(plan: StepPlan, rows: Tensor) -> Tensor:
        spans = [span for span in plan.spans if span.needs_sample]
        bad = [s.sequence.request_id == "beams#1" and s.end > 6 for s in spans]
        if any(bad) and error != "NaN":
            raise MemoryError("no room")
        return rows.masked_fill(torch.tensor(bad, dtype=torch.bool)[:, None], torch.nan)

    Changed(runner := runner_of(MODEL), broken)
    done = generate(runner, requests)
    assert {(done[name].reason, error in done[name].error) for name in done if name != "r0"} == {("error", True)}
    assert done["r0"].token_ids == alone["r0"]
    at_rest(runner)


WORDS_OF_ODD = (
    "entry 3 is for 'unknown', which neither runs nor waits", "entry 4 is RequestView(request_id=['r0']",
    "entry 5 is 'r0', must be a request of the state", "entry 6 is None, must be", "entry 7 is 3, must be",
    "entry 0 of preempted is ['r1'], must be a request",
)  # fmt: skip


def test_a_wrong_turn_ends_the_request_it_names() -> None:
    """An entry that names none is left out."""
    requests = [request(f"r{i}", 5 + i, 6) for i in range(3)]
    alone = finals(runner_of(MODEL), requests)

    def wrong(state: SchedulerState) -> SchedulerDecision:
        entries = [*state.running, *state.waiting]
        if state.step != 3:
            return SchedulerDecision([Turn(entry, 4) for entry in entries])
        odd: list[Any] = [entries[0]._replace(request_id=name) for name in ("unknown", ["r0"])]
        turns = [Turn(entry, -1 if entry.request_id == "r1" else 4) for entry in entries]
        unhashable: Any = ["r1"]
        return SchedulerDecision([*turns, *odd, "r0", [None, 3]], [entries[0], odd[0]], [unhashable])

    events: list[Event] = []
    done = generate(runner := runner_of(MODEL, policy=wrong, listener=events.append), requests)
    assert done["r1"].reason == "error" and "gives r1 a turn of -1 tokens" in done["r1"].error
    assert {name: done[name].token_ids for name in ("r0", "r2")} == {name: alone[name] for name in ("r0", "r2")}
    reasons = " ".join(event.reason for event in of(Scheduled, events))
    assert [words for words in WORDS_OF_ODD if words not in reasons] == []
    at_rest(runner)


def test_reasons_are_a_mapping() -> None:
    wrong: Any = ["too late"]
    runner = runner_of(MODEL, policy=lambda state: SchedulerDecision(reasons=wrong))
    with pytest.raises(WorkbenchError, match=r"reasons is \['too late'\], must be \{id: reason\}"):
        generate(runner, [request("r0", 5, 6)])


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
@settings(max_examples=tries(40))
def test_histories_with_faults(seed: int, policy: str, kind: str, pages: int, prefix: str) -> None:
    """Requests that break in every way, that are cancelled, and that are well, under any policy: the last are as alone,
    and every request has one end with one reason."""
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
    forward = runner.core.executor.forward

    def with_nan(plan):
        rows = forward(plan).clone()
        for row, span in enumerate(span for span in plan.spans if span.needs_sample):
            if span.sequence.request_id.startswith("nan"):
                rows[row] = torch.nan
        return rows

    runner.core.executor.forward = with_nan  # type: ignore[method-assign]
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
