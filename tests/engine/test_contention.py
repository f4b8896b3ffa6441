"""The rule that takes steps to one thread beside busy processes and back; no clock: step times are made up."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels.backends import Backend, backend_problems
from tests.helpers.events import of
from workbench.engine.load import load
from workbench.executors.contention import MAX_SECONDS, SLOW_STEPS, SLOWER, Contention, StepThreads, after_step
from workbench.executors.programs.decode_step import DecodeProgram, MlirStep
from workbench.executors.programs.rows import RowsProgram
from workbench.executors.reference import CacheLayout, single_decode_step
from workbench.executors.step_runner import StepRunner
from workbench.executors.thread_waiting import ThreadWaiting
from workbench.request import Request, SamplingParameters
from workbench.trace.events import ThreadsChanged
from workbench.trace.recorder import Recorder
from workbench.trace.script import StepScript

seconds = st.floats(1e-5, 1.0)
ONE = 0.001


def run(state: Contention, alone: Iterable[float], together: Iterable[float]) -> tuple[Contention, list[bool]]:
    """Steps whose times on one thread and on all are these; on which of them one thread ran."""
    ran = []
    for one, all_ in zip(alone, together, strict=True):
        ran.append(state.single_threaded)
        state = after_step(state, one if state.single_threaded else all_)
    return state, ran


@given(st.lists(st.floats(0.0001, SLOWER * ONE), min_size=2, max_size=300))
def test_all_threads_run_while_none_are_slow(together: list[float]) -> None:
    _, ran = run(Contention(), [ONE] * len(together), together)
    assert ran == [False, True] + [False] * (len(together) - 2)


@given(st.lists(st.floats(0.0001, SLOWER * ONE), min_size=3, max_size=60), st.integers(3, 59), st.floats(0.01, 100.0))
def test_a_single_slow_step_changes_nothing(together: list[float], at: int, slow: float) -> None:
    together.insert(min(at, len(together)), slow)
    _, ran = run(Contention(), [ONE] * len(together), together)
    assert sum(ran) == 1


@given(st.lists(st.floats(0.01, 1.0), min_size=200, max_size=2000))
def test_beside_busy_processes_few_steps_run_on_all_threads(together: list[float]) -> None:
    """After the first steps, all threads together take at most a 16th of the time that one thread takes."""
    state, ran = run(Contention(), [ONE] * len(together), together)
    start = 2 + SLOW_STEPS
    assert ran[:start] == [False, True] + [False] * SLOW_STEPS
    spent = [took for took, alone in zip(together[start:], ran[start:], strict=True) if not alone]
    on_one = ONE * sum(ran[start:])
    last = max(together)
    assert sum(spent) <= (on_one + ONE) / min(16, MAX_SECONDS / last) + last
    assert state.left is not None


@given(st.integers(0, 400), st.floats(0.01, 0.1))
def test_all_threads_come_back_when_the_cores_are_free(busy_steps: int, slow: float) -> None:
    busy = 2 + SLOW_STEPS + busy_steps
    state, _ = run(Contention(), [ONE] * busy, [slow] * busy)
    calm = int(MAX_SECONDS / ONE) + 2
    state, ran = run(state, [ONE] * calm, [ONE / 2] * calm)
    assert state.left is None and not ran[-1]
    assert ran == sorted(ran, reverse=True)  # once back, they stay


@given(st.lists(st.tuples(seconds, seconds), max_size=400))
def test_whatever_steps_take_one_thread_is_never_for_good(times: list[tuple[float, float]]) -> None:
    state = Contention()
    for one, all_ in times:
        held = state.left
        state = after_step(state, one if state.single_threaded else all_)
        assert state.left is None or state.left <= MAX_SECONDS
        assert held is None or held <= 0 or state.left is not None and state.left < held


def test_a_longer_context_is_not_taken_for_contention_for_long() -> None:
    """Steps become ten times longer on any number of threads: what one thread takes is measured anew."""
    state, _ = run(Contention(), [ONE] * 50, [ONE / 2] * 50)
    state, ran = run(state, [10 * ONE] * 200, [5 * ONE] * 200)
    assert 0 < sum(ran) < 20 and state.left is None


class Times:
    """A clock that steps move on: `alone` seconds on one thread, `together` on more."""

    def __init__(self, alone: float, together: float):
        self.alone, self.together, self.now, self.ran = alone, together, 0.0, []

    def __call__(self) -> float:
        return self.now

    def step(self, threads: int) -> None:
        self.ran.append(threads)
        self.now += self.alone if threads == 1 else self.together


def test_changes_are_reported_with_their_reason(two_threads: None) -> None:
    changes: list[tuple[int, str]] = []
    times = Times(0.001, 0.09)
    threads = StepThreads(lambda *change: changes.append(change), times)
    for _ in range(10):
        threads.run("decode 1", times.step)
    assert times.ran == [2, 1, 2, 2] + [1] * 6
    words = "decode 1: a step on 2 threads took 90 ms, one thread 1 ms: other processes hold the cores"
    assert changes == [(1, f"{words}; tried again after 1.44 s of steps")]
    times.together = 0.0005
    for _ in range(2000):
        threads.run("decode 1", times.step)
    assert changes[1] == (2, "decode 1: a step on 2 threads took 500 µs, one thread 1 ms on average")


def test_shapes_are_judged_apart_and_one_thread_has_no_choice(two_threads: None) -> None:
    times = Times(0.001, 0.09)
    threads = StepThreads(clock=times)
    for _ in range(6):
        threads.run("decode 1", times.step)
    times.ran.clear()
    threads.run("decode 2", times.step)
    assert times.ran == [2]
    torch.set_num_threads(1)
    threads.run("decode 1", times.step)
    assert times.ran == [2, 1]


def test_several_steps_of_one_call_count_as_such(two_threads: None) -> None:
    times = Times(0.001, 0.0015)
    threads = StepThreads(clock=times)
    for steps in (1, 1, 1, 4, 4, 4):
        threads.run("drafts", times.step, steps)
    assert times.ran == [2, 1, 2, 2, 2, 2]


problem = backend_problems()[Backend.MLIR]
needs_mlir = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")


@needs_mlir
@pytest.mark.parametrize("settings", [{}, {"weights": "int8"}, {"weights": "int4"}, {"cache": "int8"}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_threads_gives_the_same_bits(two_threads: None, dtype: str, settings: dict) -> None:
    """A step is compiled once, for as many parts of a context as torch has threads, and run on any number."""
    model = (runner := load("shape:tiny", backend="mlir", dtype=dtype, **settings)).model
    held = CacheLayout(runner.store.specs, runner.store.page_size, runner.store.dtype)
    store, plan = single_decode_step(model, held, 150)
    found = []
    for threads in (1, 2, 3, 5):
        step = MlirStep(DecodeProgram(model, store, threads=Fixed(threads)), 2)
        rows = StepRunner(RowsProgram(model, store, threads=Fixed(threads)))
        with torch.inference_mode():
            found.append((step(plan).clone(), rows.forward(plan).clone()))
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))


class Fixed(StepThreads):
    """Always that many threads."""

    def __init__(self, threads: int):
        super().__init__()
        self.threads = threads

    def run(self, shape: object, step: object, steps: int = 1) -> float:
        step(self.threads)  # type: ignore[operator]
        return 0.0


def test_a_change_is_a_row_of_the_record_and_no_decision_of_the_scheduler() -> None:
    recorder = Recorder()
    plain = StepScript.from_recorder(recorder)
    recorder.record(ThreadsChanged(1.0, step=3, threads=1, reason="busy"))
    (row,) = recorder.decisions()
    assert (row["kind"], row["action"], row["step"], row["reason"]) == ("threads_changed", "1", 3, "busy")
    assert StepScript.from_recorder(recorder).same_as(plain)


@needs_mlir
def test_the_runner_tells_its_listener(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr("workbench.engine.core.THREADS", ThreadWaiting(dict))  # it would tell of a busy machine
    runner = load("shape:tiny", backend="mlir", listener=recorder.record)
    real = after_step
    made_up = lambda state, _: real(state, 1e-4 if state.single_threaded else 0.09)  # noqa: E731
    monkeypatch.setattr("workbench.executors.contention.after_step", made_up)
    list(runner.stream([Request("a", (1, 2, 3), SamplingParameters(max_tokens=12, ignore_eos=True))]))
    (change,) = of(ThreadsChanged, recorder.events)
    assert change.threads == 1 and "other processes hold the cores" in change.reason
