"""A cancellation may come at any moment, from anywhere: nothing raises, nothing follows a request's end, and no one
else's tokens are other than they would have been. Nor are they where a listener raises."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.at_rest import at_rest
from tests.engine.interrupted import KINDS, OURS, lines_of
from tests.engine.tiny import request
from tests.patience import limit
from tests.thorough import tries
from workbench.engine.inputs import sample_id
from workbench.engine.runner import Runner
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
    return {sample_id(e.request_id, e.sample): e for e in box if isinstance(e, Finished)}


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


def at_line(line: int, act: Callable[[], None], work: Callable[[], Any]) -> Any:
    """`work`, and at its line number `line` of our code, wherever that is, `act` in the same thread."""
    count = 0

    def traced(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count - 1 == line:
                sys.settrace(None)
                act()
        return traced if count <= line else None

    def called(frame: FrameType, event: str, value: Any) -> Any:
        return traced if frame.f_code.co_filename.startswith(OURS) else None

    before = sys.gettrace()
    try:
        sys.settrace(called)
        return work()
    finally:
        sys.settrace(before)


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


@pytest.mark.parametrize("kind", KINDS)
def test_at_any_line_by_a_timer_or_another_thread(kind: str, lengths: dict[str, int]) -> None:
    @settings(max_examples=tries(8), deadline=None)
    @given(st.floats(0, 0.99), st.sampled_from("abc"), st.booleans())
    def law(place: float, name: str, thread: bool) -> None:
        runner = KINDS[kind]()
        heard = heard_by(runner)
        cancel = lambda: runner.cancel(name)  # noqa: E731
        act = (lambda: by_thread(cancel)) if thread else cancel
        done = at_line(int(place * lengths[kind]), act, lambda: ends(runner, deque()))
        check(runner, kind, done, heard, {name})

    law()


@pytest.mark.parametrize("kind", KINDS)
def test_during_any_forward_pass(kind: str) -> None:
    @settings(max_examples=tries(6), deadline=None)
    @given(st.integers(0, 12), st.sampled_from("abc"), st.booleans())
    def law(at: int, name: str, thread: bool) -> None:
        runner = KINDS[kind]()
        heard, forward, count = heard_by(runner), runner.executor.forward, iter(range(10_000))

        def computing(plan: Any) -> Any:
            logits = forward(plan)
            if next(count) == at:
                by_thread(lambda: runner.cancel(name)) if thread else runner.cancel(name)
            return logits

        runner.executor.forward = computing  # type: ignore[method-assign]
        check(runner, kind, ends(runner, deque()), heard, {name})

    law()


@pytest.mark.parametrize("event_kind", EVENTS)
def test_by_a_listener_at_every_kind_of_event(event_kind: str) -> None:
    @settings(max_examples=tries(8), deadline=None)
    @given(st.sampled_from(list(KINDS)), st.integers(0, 6), st.sampled_from("abc"), st.booleans())
    def law(kind: str, at: int, name: str, thread: bool) -> None:
        runner, count = KINDS[kind](), iter(range(10_000))
        cancelled = {name}

        def also(event: Event) -> None:
            if event.kind == event_kind and next(count) == at:
                by_thread(lambda: runner.cancel(name)) if thread else runner.cancel(name)
            if event_kind == "cancelled" and event.kind == "decoded" and not cancelled - {name}:
                cancelled.add("b")  # so that there is one to hear of
                runner.cancel("b")

        heard = heard_by(runner, also)
        check(runner, kind, ends(runner, deque()), heard, cancelled)

    law()


class Objected(Exception):
    pass


@pytest.mark.parametrize("event_kind", EVENTS)
def test_a_listener_that_raises_changes_nobodys_tokens(event_kind: str) -> None:
    """Its error comes out of the step, submission or cancellation that it heard of, when that is done."""

    @settings(max_examples=tries(6), deadline=None)
    @given(st.sampled_from(list(KINDS)), st.integers(0, 6))
    def law(kind: str, at: int) -> None:
        runner, box, count, raised = KINDS[kind](), deque[Event](), iter(range(10_000)), 0

        def also(event: Event) -> None:
            if event.kind == event_kind and next(count) == at:
                raise Objected

        heard = heard_by(runner, also)
        work: list[Callable[[], Any]] = [lambda each=each: runner.submit(each, box) for each in ASKED]
        while work or runner.has_unfinished_requests:
            try:
                work.pop(0)() if work else runner.step(box)
            except Objected:
                raised += 1
        assert raised == (len([e for e in heard if e.kind == event_kind]) > at)
        done = {sample_id(e.request_id, e.sample): e for e in box if isinstance(e, Finished)}
        check(runner, kind, done, heard, set())

    law()


@pytest.mark.parametrize("kind", KINDS)
def test_anothers_cancellation_does_not_raise_what_the_steps_listener_raised(kind: str) -> None:
    """It comes out of the step, whichever is cancelled between error and the step's end (`by_thread` asserts that)."""
    runner, box, raised = KINDS[kind](), deque[Event](), 0

    def also(event: Event) -> None:
        if event.kind == "step_planned":
            raise Objected

    heard, forward, at = heard_by(runner, also), runner.executor.forward, iter(range(10_000))

    def computing(plan: Any) -> Any:
        logits = forward(plan)
        if next(at) == 2:
            by_thread(lambda: runner.cancel("a"))
        return logits

    runner.executor.forward = computing  # type: ignore[method-assign]
    for each in ASKED:
        runner.submit(each, box)
    while runner.has_unfinished_requests:
        try:
            runner.step(box)
        except Objected:
            raised += 1
    assert raised == len([e for e in heard if e.kind == "step_planned"])
    done = {sample_id(e.request_id, e.sample): e for e in box if isinstance(e, Finished)}
    check(runner, kind, done, heard, {"a"})
