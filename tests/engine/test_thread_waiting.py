"""The waiting of threads for each other: the rule, the sleep of libgomp, and the steps that are looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench
from workbench.executors import thread_waiting
from workbench.executors.thread_waiting import (
    IDLE_SECONDS,
    SLEEP_ABOVE,
    SPIN_BELOW,
    VARIABLES,
    WINDOW_SECONDS,
    IdlePool,
    ThreadWaiting,
    adaptable,
    sleeps_next,
)
from workbench.machine.environment import child_environment, environment
from workbench.tensor_parallel import executor as ranks
from workbench.trace.events import Decoded, Event, ThreadsChanged

needs_libgomp = pytest.mark.skipif(not adaptable(), reason="no libgomp, or OMP_WAIT_POLICY or GOMP_SPINCOUNT is set")


@pytest.fixture
def two_threads() -> Iterable[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Machine:
    """A machine with a clock, on which a second of steps has so many seconds without a core. It is an idle pool too."""

    def __init__(self) -> None:
        self.now, self.without, self.running = 0.0, 0.0, False
        self.waiting = ThreadWaiting(lambda: self.without, cast(IdlePool, self), lambda: self.now)

    def start(self) -> None:
        assert not self.running
        self.running = True

    def stop(self) -> None:
        assert self.running
        self.running = False

    def step(self, seconds: float, share: float) -> list[str]:
        reasons: list[str] = []
        with self.waiting.step(reasons.append):
            self.now += seconds
            self.without += share * seconds
        return reasons


@given(st.booleans(), st.floats(0, 4))
def test_between_the_limits_nothing_changes(sleeps: bool, share: float) -> None:
    after = sleeps_next(sleeps, share)
    assert after or share <= SLEEP_ABOVE
    assert not after or share >= SPIN_BELOW
    assert sleeps_next(after, share) is after


@needs_libgomp
@pytest.mark.usefixtures("two_threads")
@given(st.lists(st.tuples(st.floats(0.0001, 1), st.floats(0, 2), st.floats(0, 100)), max_size=30))
def test_a_pool_runs_while_threads_sleep_and_each_change_is_reported(history: list[tuple[float, float, float]]) -> None:
    machine = Machine()
    for seconds, share, idle in history:
        before = machine.waiting.sleeps
        reasons = machine.step(seconds, share)
        assert len(reasons) == (machine.waiting.sleeps is not before)
        assert machine.running is machine.waiting.sleeps
        machine.now += idle


@needs_libgomp
@pytest.mark.usefixtures("two_threads")
@given(st.floats(0.001, 1), st.floats(0, 0.9 * IDLE_SECONDS), st.sampled_from([0.0, 3.0]))
def test_after_a_window_of_steps_threads_wait_as_it_says(seconds: float, gap: float, share: float) -> None:
    """Even where each step is followed by some time without work; and from one state as from the other."""
    machine = Machine()
    machine.waiting.sleeps = machine.running = share == 0.0
    for _ in range(2 + int(WINDOW_SECONDS / seconds)):
        machine.step(seconds, share)
        machine.now += gap * min(1.0, seconds)
    assert machine.waiting.sleeps is (share > 0)


@needs_libgomp
@pytest.mark.usefixtures("two_threads")
def test_time_between_requests_is_no_time_of_steps() -> None:
    machine = Machine()
    for _ in range(3):
        assert machine.step(WINDOW_SECONDS, 0.9) == [] or machine.waiting.sleeps
        machine.now += 3600  # in which no thread wants a core
        assert machine.waiting.sleeps


def test_one_thread_waits_for_no_other() -> None:
    assert torch.get_num_threads() == 1
    machine = Machine()
    machine.step(10.0, 2.0)
    assert not machine.waiting.sleeps


COUNT_SLEEPS = """
import json, os, torch
from workbench.executors.thread_waiting import IdlePool
torch.set_num_threads(2)
x, y = torch.zeros(100_000), torch.zeros(100_000)
LOOKS = 5000

def sleeps(looks):
    torch.add(x, 1.0, out=y)
    first = before = switches()
    for _ in range(20):
        torch.add(x, 1.0, out=y)
        any(switches() > before for _ in range(looks))
        before = switches()
    return before - first

def switches():
    found = 0
    for task in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        with open(f"/proc/self/task/{task}/status") as status:
            found += sum(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
    return found

def threads():
    return len(os.listdir("/proc/self/task"))

torch.add(x, 1.0, out=y)
before, pool = threads(), IdlePool()
spinning = sleeps(20)
pool.start()
more = threads() - before
asleep = sleeps(LOOKS)
pool.stop()
ended = any(threads() == before for _ in range(LOOKS))
print(json.dumps([spinning, more, asleep, ended, sleeps(20)]))
"""


@needs_libgomp
def test_threads_of_libgomp_sleep_while_the_pool_runs() -> None:
    """Switches to other threads are counted in 20 waits: where spinning has no end, only a thread that sleeps gives its
    core up of its own will, but for one that begins or ends."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT_SLEEPS], env=child_environment(GOMP_SPINCOUNT=str(10**15)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    spinning, more, asleep, ended, spinning_again = json.loads(done.stdout)
    assert max(spinning, spinning_again) < 10 and asleep >= 20
    assert ended and more == (os.cpu_count() or 1) + 1


@needs_libgomp
@pytest.mark.usefixtures("two_threads")
def test_steps_of_a_runner_are_looked_at_and_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def logprobs(share: float) -> tuple[list[float | None], list[Event]]:
        now = [0.0]

        def clock() -> float:
            now[0] += WINDOW_SECONDS
            return now[0]

        waiting = ThreadWaiting(lambda: share * now[0], clock=clock)
        monkeypatch.setattr("workbench.engine.runner.THREADS", waiting)
        runner = workbench.load("shape:tiny", backend="eager")
        heard: list[Event] = []
        runner.telemetry.listener = heard.append
        events = list(runner.stream([request()]))
        slept = waiting.sleeps
        if slept:
            waiting._pool.stop()
        assert slept is (share > SLEEP_ABOVE)
        return [event.logprob for event in events if isinstance(event, Decoded)], heard

    spinning, heard = logprobs(0.0)
    assert not [event for event in heard if isinstance(event, ThreadsChanged)]
    asleep, heard = logprobs(2.0)
    assert asleep == spinning and len(spinning) == 6
    (change,) = [event for event in heard if isinstance(event, ThreadsChanged)]
    assert change.threads == 2 and "asleep" in change.reason


def request() -> workbench.Request:
    sampling = workbench.SamplingParameters(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    return workbench.Request("a", tuple(range(1, 40)), sampling)


def test_steps_of_a_rank_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []

    @contextmanager
    def step() -> Iterator[None]:
        ran.append("a step begins")
        yield
        ran.append("it ends")

    monkeypatch.setattr(ranks, "THREADS", SimpleNamespace(step=step))
    monkeypatch.setattr(ranks, "from_arrays", lambda values, device: values)
    monkeypatch.setattr(ranks.RankExecutor, "compute", lambda self, *content: ran.append(content))
    model = cast(Any, SimpleNamespace(device="cpu"))
    tasks = ranks.tasks_of(lambda: model, lambda *layout: cast(Any, None))
    tasks[ranks.OPEN_CACHE]((0, (), []))
    tasks[ranks.FORWARD]((0, "batch", ranks.BLOCKS, False))
    assert ran == ["a step begins", ("batch", ranks.BLOCKS, False), "it ends"]


@pytest.mark.parametrize("name", VARIABLES)
def test_what_a_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "passive" if name == "OMP_WAIT_POLICY" else "7")
    assert not adaptable.__wrapped__()
    assert environment(with_torch=False, sample_seconds=0)["threads"][name] in ("passive", "7")


def test_where_the_system_counts_no_time_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_waiting, "Path", lambda *parts: SimpleNamespace(exists=lambda: False))
    assert not adaptable.__wrapped__()
