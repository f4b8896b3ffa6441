"""An interrupt at any moment ends what its cell asked for, and harms nothing else."""

from __future__ import annotations

import signal
import threading
from collections import deque
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import many_histories
from tests.engine.history import History
from tests.engine.interrupted import KINDS, interrupted, lines_of
from tests.engine.tiny import finals, request
from tests.helpers.events import of
from tests.thorough import tries
from workbench.engine.runner import Runner
from workbench.interrupts import DeferInterrupts
from workbench.request import FinishReason
from workbench.trace.events import Event, Finished

MINE = [request("a", 11, 9), request("c", 5, 6, n=3, temperature=1.0, seed=3), request("d", 4, 5, beams=2)]
OTHER, NEXT = request("b", 14, 16), request("e", 17, 8)


@cache
def alone(kind: str) -> dict[str, Any]:
    return finals(KINDS[kind](), [OTHER]) | finals(KINDS[kind](), [NEXT])


def mine(runner: Runner) -> None:
    asked = [each for each in MINE if not (each.sampling.beams and runner.kv_cache.evictor is not None)]
    for _ in runner.stream(asked):
        pass


def check(runner: Runner, box: deque[Event], kind: str) -> None:
    """The other one ends as it does alone, the next one too, and all pages are free."""
    left = runner.tracker.sequences
    assert set(left) <= {"b"} and len(runner.scheduler.running) + len(runner.scheduler.waiting) == len(left)
    assert [request_id for request_id in runner.tracker._stop_checkers if request_id not in left] == []
    while runner.has_unfinished_requests:
        runner.step(box)
    (end,) = of(Finished, box)
    assert end.reason == FinishReason.LENGTH and end.token_ids == alone(kind)["b"]
    assert finals(runner, [NEXT])["e"] == alone(kind)["e"]
    runner.reset_prefix_cache()
    assert all(pool.num_used == 0 and pool.num_free == pool.num_pages for pool in runner.scheduler.pools)


def one(kind: str, line: int) -> bool:
    runner, box = KINDS[kind](), deque[Event]()
    runner.submit(OTHER, box)
    runner.step(box)
    left = interrupted(lambda: mine(runner), line)
    check(runner, box, kind)
    return left


def begun(kind: str) -> Runner:
    runner = KINDS[kind]()
    runner.submit(OTHER)
    runner.step()
    return runner


@pytest.fixture(scope="module")
def lengths() -> dict[str, int]:
    return {kind: lines_of(partial(mine, begun(kind))) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_runner_goes_on_whenever_a_stream_is_interrupted(kind: str, lengths: dict[str, int]) -> None:
    @settings(max_examples=tries(6))
    @given(st.integers(0, lengths[kind] - 2))
    def at(line: int) -> None:
        assert one(kind, line), "the interrupt was lost"

    at()


def test_steps_that_were_planned_and_never_computed_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler alone, under any policy: a plan that was not committed is as if it had not been."""
    step, lost = History.one_step, 0

    def one_step(self: History) -> bool:
        nonlocal lost
        while self.draw.random() < 0.25 and (plan := self.scheduler.plan()) is not None:
            self.memory.move(plan)
            for sequence, _ in plan.errors:
                if sequence.finish_reason is None:
                    self.end(sequence, FinishReason.ERROR)
            if self.draw.random() < 0.5:  # what a forward pass has written by then is written again
                self.memory.compute(plan)
            lost += 1
        return step(self)

    monkeypatch.setattr(History, "one_step", one_step)
    assert many_histories.run(range(40)) == {} and lost > 100


def test_an_interrupt_waits_for_its_moment() -> None:
    came: list[str] = []
    with pytest.raises(KeyboardInterrupt), DeferInterrupts() as held:
        signal.raise_signal(signal.SIGINT)
        came.append("held")
        with held.allow():
            came.append("never")
    with pytest.raises(KeyboardInterrupt), DeferInterrupts() as held, DeferInterrupts():
        with held.allow():
            came.append("let through")
        signal.raise_signal(signal.SIGINT)
        came.append("held to the end")
    assert came == ["held", "let through", "held to the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_deaf_processes_are_left_alone() -> None:
    seen: list[object] = []

    def inside() -> None:
        with DeferInterrupts() as held, held.allow():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        inside()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [before, signal.SIG_IGN]
