"""A cancellation may come at any moment, from anywhere: nothing raises, nothing follows a request's end, and no one
else's tokens are other than they would have been. Nor are they where a listener raises."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.at_rest import at_rest
from tests.engine.interrupted import KINDS, MODEL, at_line, lines_of
from tests.engine.own_rules import BACKWARDS
from tests.engine.tiny import request, runner_of
from tests.helpers.events import of
from tests.patience import limit
from tests.thorough import tries
from workbench.engine.inputs import sample_id
from workbench.engine.runner import Runner, generate
from workbench.trace.events import Event, Finished

ASKED = [request("a", 11, 9), request("b", 14, 12), request("c", 5, 6, n=2, temperature=1.0, seed=3)]
EVENTS = [
    "submitted", "scheduled", "step_planned", "cancelled", "prefilled", "decoded", "verified", "preempted", "finished",
    "stepped",
]  # fmt: skip


def ends(runner: Runner, box: deque[Event]) -> dict[str, Finished]:
    for each in ASKED:
        runner.submit(each, box)
    while runner.has_unfinished_requests:
        runner.step(box)
    return {sample_id(e.request_id, e.sample): e for e in of(Finished, box)}


@cache
def alone(kind: str) -> dict[str, tuple[int, ...]]:
    return {name: end.token_ids for name, end in ends(KINDS[kind](), deque()).items()}


def heard_by(runner: Runner, also: Callable[[Event], None] = lambda event: None) -> list[Event]:
    heard: list[Event] = []

    def listener(event: Event) -> None:
        heard.append(event)
        also(event)

    runner.set_listener(listener)
    return heard


def check(runner: Runner, kind: str, done: dict[str, Finished], heard: list[Event], cancelled: set[str]) -> None:
    assert set(done) == set(alone(kind))
    for name, end in done.items():
        whole = alone(kind)[name]
        assert end.reason == "length" or end.request_id in cancelled
        assert end.token_ids == (whole if end.reason == "length" else whole[: len(end.token_ids)])
        mine = [e for e in heard if (e.request_id, e.sample) == (end.request_id, end.sample)]
        mine = [e for e in mine if e.kind != "cancelled"]
        assert [e.kind for e in mine].count("finished") == 1 and mine[-1].kind == "finished", mine[-3:]
        chosen = [e.token_id for e in mine if e.kind == "decoded"]  # type: ignore[attr-defined]
        assert tuple(chosen) == end.token_ids[: len(chosen)] and (end.reason != "length" or len(chosen) == len(whole))
    at_rest(runner)


def by_thread(act: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(limit(60))  # it never waits for the step, so it may be waited for within one
    assert not thread.is_alive() and not raised


@pytest.fixture(scope="module")
def lengths() -> dict[str, int]:
    return {kind: lines_of(lambda made=made: ends(made(), deque())) for kind, made in KINDS.items()}


def after_forward(runner: Runner, at: int, act: Callable[[], object]) -> None:
    """Act in the step whose forward pass has this number, when that is done."""
    forward, count = runner.core.executor.forward, iter(range(10_000))

    def computing(plan: Any) -> Any:
        logits = forward(plan)
        if next(count) == at:
            act()
        return logits

    runner.core.executor.forward = computing  # type: ignore[method-assign]


def cancel_by(runner: Runner, name: str, thread: bool) -> None:
    by_thread(lambda: runner.cancel(name)) if thread else runner.cancel(name)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=tries(8))
@given(st.floats(0, 0.99), st.sampled_from("abc"), st.booleans())
def test_at_any_line_by_a_timer_or_another_thread(lengths: dict, kind: str, place: float, name: str, thread: bool):
    runner = KINDS[kind]()
    heard = heard_by(runner)
    act = lambda: cancel_by(runner, name, thread)  # noqa: E731
    done, _ = at_line(int(place * lengths[kind]), act, lambda: ends(runner, deque()))
    check(runner, kind, done, heard, {name})


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=tries(6))
@given(st.integers(0, 12), st.sampled_from("abc"), st.booleans())
def test_during_any_forward_pass(kind: str, at: int, name: str, thread: bool) -> None:
    heard = heard_by(runner := KINDS[kind]())
    after_forward(runner, at, lambda: cancel_by(runner, name, thread))
    check(runner, kind, ends(runner, deque()), heard, {name})


@pytest.mark.parametrize("event_kind", EVENTS)
@settings(max_examples=tries(8))
@given(st.sampled_from(list(KINDS)), st.integers(0, 6), st.sampled_from("abc"), st.booleans())
def test_by_a_listener_at_every_kind_of_event(event_kind: str, kind: str, at: int, name: str, thread: bool) -> None:
    runner, count = KINDS[kind](), iter(range(10_000))
    cancelled = {name}

    def also(event: Event) -> None:
        if event.kind == event_kind and next(count) == at:
            cancel_by(runner, name, thread)
        if event_kind == "cancelled" and event.kind == "decoded" and not cancelled - {name}:
            cancelled.add("b")  # so that there is one to hear of
            runner.cancel("b")

    heard = heard_by(runner, also)
    check(runner, kind, ends(runner, deque()), heard, cancelled)


class Objected(Exception):
    pass


@pytest.mark.parametrize("event_kind", EVENTS)
@settings(max_examples=tries(8))
@given(st.sampled_from(list(KINDS)), st.integers(0, 6), st.booleans())
@example("plain", 0, True)
@example("lookup", 1, True)
def test_a_listener_that_raises_changes_nobodys_tokens(event_kind: str, kind: str, at: int, cancels: bool) -> None:
    """Its error comes out of the step, submission or cancellation that it heard of, when that is done. Where it raises
    in every step, that is so of a step in which another thread cancels (`by_thread` asserts that nothing comes out)."""
    runner, box, count, raised = KINDS[kind](), deque[Event](), iter(range(10_000)), 0
    cancels = cancels and event_kind == "step_planned"

    def also(event: Event) -> None:
        if event.kind == event_kind and ((number := next(count)) == at or number > at and cancels):
            raise Objected

    heard = heard_by(runner, also)
    after_forward(runner, 2 if cancels else -1, lambda: by_thread(lambda: runner.cancel("a")))
    work: list[Callable[[], Any]] = [lambda each=each: runner.submit(each, box) for each in ASKED]
    while work or runner.has_unfinished_requests:
        try:
            work.pop(0)() if work else runner.step(box)
        except Objected:
            raised += 1
    later = max(0, len([e for e in heard if e.kind == event_kind]) - at)
    assert raised == (later if cancels else min(later, 1))
    done = {sample_id(e.request_id, e.sample): e for e in of(Finished, box)}
    check(runner, kind, done, heard, {"a"} if cancels else set())


@pytest.mark.parametrize("moment", [2, 4, 5, 9, 14])
@pytest.mark.parametrize(
    ("count", "sampling"),
    [(3, {"n": 3}), (3, {"best_of": 3, "temperature": 0.9}), (3, {"beams": 3, "n": 3}), (1, BACKWARDS)],
)
def test_a_cancel_ends_every_sequence_of_a_request(count: int, sampling: dict[str, Any], moment: int) -> None:
    """Samples, candidates of a choice, beams and a second stream; the id is free then."""
    asked, runner = request("a", 10, 12, **sampling), runner_of(MODEL, prefix="radix", max_num_batched_tokens=4)
    ends = []
    for number, event in enumerate(runner.stream([asked, request("b", 3, 3)])):
        if number == moment:
            runner.cancel("a")
        ends += [event] if isinstance(event, Finished) else []
    wanted = [("a", number, "cancelled") for number in range(count)]
    assert sorted((e.request_id, e.sample, e.reason) for e in ends) == [*wanted, ("b", 0, "length")]
    at_rest(runner)
    assert len(generate(runner, [asked])) == count
    refused = generate(runner, [request("a", 60, 9, **sampling)])
    assert [end.reason for end in refused.values()] == ["refused"] * count
