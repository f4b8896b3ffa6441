"""The waiting of threads for each other: the rule, the sleep of libgomp, and the steps that are looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench
from tests.helpers.events import of
from workbench.executors import thread_waiting
from workbench.executors.thread_waiting import (
    IDLE_SECONDS,
    SLEEP_ABOVE,
    SPIN_BELOW,
    VARIABLES,
    WINDOW_COSTS,
    WINDOW_SECONDS,
    IdlePool,
    ThreadWaiting,
    adaptable,
    coreless_seconds,
    sleeps_next,
)
from workbench.machine.environment import child_environment, environment
from workbench.tensor_parallel import executor as ranks
from workbench.trace.events import Decoded, Event, ThreadsChanged

CPU = torch.device("cpu")


def adaptable_but_for_variables() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        return adaptable.__wrapped__()


needs_libgomp = pytest.mark.skipif(not adaptable_but_for_variables(), reason="no libgomp, or no count of time")


def two(test: Any) -> Any:
    """Mark a test that needs libgomp and two threads of torch."""
    return needs_libgomp(pytest.mark.usefixtures("two_threads")(test))


@pytest.fixture(autouse=True)
def no_choice_of_a_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let threads adapt, whatever variables the tests are run with: nothing would be tested otherwise."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    adaptable.cache_clear()
    yield
    adaptable.cache_clear()


class Machine:
    """A machine with a clock, on which a second of steps has so many seconds without a core. It is an idle pool too."""

    def __init__(self, cost: float = 0.0, refuses: bool = False) -> None:
        self.now, self.cost, self.refuses = 0.0, cost, refuses
        self.without = {1: 0.0}
        self.running, self.asked = False, 0
        self.looks: list[float] = []
        clock = lambda: self.now  # noqa: E731
        self.waiting = ThreadWaiting(self.look, cast(IdlePool, self), clock, clock)

    def look(self) -> dict[int, float]:
        self.looks.append(self.now)
        self.now += self.cost
        return dict(self.without)

    def start(self) -> None:
        assert not self.running and not self.waiting.sleeps
        self.asked += 1
        if self.refuses:
            raise RuntimeError("can't start new thread")
        self.running = True

    def stop(self) -> None:
        assert self.running and self.waiting.sleeps
        self.running = False

    def step(self, seconds: float, share: float, device: torch.device = CPU) -> list[str]:
        reasons: list[str] = []
        with self.waiting.step(device, reasons.append):
            self.now += seconds
            self.without[1] += share * seconds
        return reasons


@given(st.booleans(), st.floats(0, 4))
def test_between_the_limits_nothing_changes(sleeps: bool, share: float) -> None:
    after = sleeps_next(sleeps, share)
    assert after or share <= SLEEP_ABOVE
    assert not after or share >= SPIN_BELOW
    assert sleeps_next(after, share) is after


@two
@given(st.lists(st.tuples(st.floats(0.0001, 1), st.floats(0, 2), st.floats(0, 100)), max_size=30))
def test_a_pool_runs_while_threads_sleep_and_each_change_is_reported(history: list[tuple[float, float, float]]) -> None:
    machine = Machine()
    for seconds, share, idle in history:
        before = machine.waiting.sleeps
        reasons = machine.step(seconds, share)
        assert len(reasons) == (machine.waiting.sleeps is not before)
        assert machine.running is machine.waiting.sleeps
        machine.now += idle


@two
@given(st.floats(0.001, 1), st.floats(0, 0.9 * IDLE_SECONDS), st.sampled_from([0.0, 3.0]))
def test_after_a_window_of_steps_threads_wait_as_it_says(seconds: float, gap: float, share: float) -> None:
    """Even where each step is followed by some time without work; and from one state as from the other."""
    machine = Machine()
    machine.waiting.sleeps = machine.running = share == 0.0
    for _ in range(2 + int(WINDOW_SECONDS / seconds)):
        machine.step(seconds, share)
        machine.now += gap * min(1.0, seconds)
    assert machine.waiting.sleeps is (share > 0)


@two
def test_time_between_requests_is_no_time_of_steps() -> None:
    machine = Machine()
    for _ in range(3):
        assert machine.step(WINDOW_SECONDS, 0.9) == [] or machine.waiting.sleeps
        machine.now += 3600  # in which no thread wants a core
        assert machine.waiting.sleeps


@two
def test_a_short_time_between_steps_is_no_time_of_steps() -> None:
    """It is too short for a look of its own, so that the window goes on."""
    machine = Machine()
    share = 0.5 * (SLEEP_ABOVE + 1.0)
    machine.step(0.4 * WINDOW_SECONDS, share)
    machine.now += 0.55 * WINDOW_SECONDS
    assert 0.55 * WINDOW_SECONDS > IDLE_SECONDS
    (reason,) = machine.step(0.7 * WINDOW_SECONDS, share)
    assert f"{share:.2f} s of a second" in reason and len(machine.looks) == 2


@two
@given(st.lists(st.tuples(st.floats(0.0001, 1), st.floats(0, 2), st.floats(0, 3)), max_size=60), st.floats(0, 0.02))
def test_looks_cost_a_hundredth_of_the_time(history: list[tuple[float, float, float]], cost: float) -> None:
    machine = Machine(cost)
    for seconds, share, idle in history:
        machine.step(seconds, share)
        machine.now += idle
    apart = max(WINDOW_SECONDS, WINDOW_COSTS * cost)
    assert all(later - look >= 0.999 * apart for look, later in zip(machine.looks, machine.looks[1:], strict=False))


@two
@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 2), st.dictionaries(st.integers(2, 4), st.floats(0, 9)))))
def test_threads_that_begin_and_end_change_nothing(history: list[tuple[float, float, dict[int, float]]]) -> None:
    """Their totals come and go; one that stays in this test had a core all the time."""
    alone, beside = Machine(), Machine()
    totals: dict[int, float] = {}
    for seconds, share, others in history:
        totals = others | totals
        beside.without = {1: beside.without[1], **{thread: totals[thread] for thread in others}}
        assert beside.step(seconds, share) == alone.step(seconds, share)


@needs_libgomp
def test_the_time_without_a_core_is_read_for_each_living_thread() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    seconds = coreless_seconds()
    ends.set()
    thread.join()
    assert {threading.get_native_id(), thread.native_id} <= seconds.keys() and min(seconds.values()) >= 0


@two
def test_where_the_system_gives_no_threads_they_spin_for_good() -> None:
    machine = Machine(refuses=True)
    reasons = [reason for _ in range(10) for reason in machine.step(WINDOW_SECONDS, 2.0)]
    assert machine.asked == 1 and not machine.waiting.sleeps
    (reason,) = reasons
    assert "go on spinning" in reason and "can't start new thread" in reason


@needs_libgomp
def test_one_thread_waits_for_no_other() -> None:
    assert torch.get_num_threads() == 1
    machine = Machine()
    machine.step(10.0, 2.0)
    assert not machine.looks


@two
def test_steps_of_another_device_are_not_looked_at() -> None:
    machine = Machine()
    machine.step(10.0, 2.0, torch.device("cuda"))
    assert not machine.looks
    machine.step(10.0, 2.0)
    assert machine.looks


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
    assert ended and more == len(os.sched_getaffinity(0)) + 1


LIMITED = """
import json, os, resource, torch
from workbench.executors.thread_waiting import IdlePool
torch.set_num_threads(2)
torch.add(torch.zeros(100_000), 1.0)
if os.getuid() == 0:  # whom no limit holds
    os.setgid(65534)
    os.setuid(65534)
threads, hard = len(os.listdir("/proc/self/task")), resource.getrlimit(resource.RLIMIT_NPROC)[1]
pool, size, started = IdlePool(), len(os.sched_getaffinity(0)) + 1, []
for room in range(size + 1):
    resource.setrlimit(resource.RLIMIT_NPROC, (threads + room, hard))
    try:
        pool.start()
        pool.stop()
        started.append(room)
    except RuntimeError:
        continue
print(json.dumps([size, started]))
"""


@needs_libgomp
def test_a_process_that_may_not_have_so_many_threads_lives_on() -> None:
    """libgomp ends it where one cannot be started. A user's other processes count too: the last try may fail."""
    done = subprocess.run([sys.executable, "-c", LIMITED], env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, started = json.loads(done.stdout)
    assert set(started) <= {size}


def test_threads_of_the_trial_are_waited_for_until_the_system_counts_them_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = [True, True, False]
    monkeypatch.setattr(thread_waiting, "Path", lambda *parts: SimpleNamespace(exists=lambda: counted.pop(0)))
    thread_waiting._try_threads(1)
    assert not counted


def test_a_pool_whose_libgomp_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_waiting, "libgomp_path", lambda: "no such file")
    with pytest.raises(OSError, match="no such file"):
        IdlePool().start()


@two
def test_steps_of_a_runner_are_looked_at_and_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def logprobs(share: float) -> tuple[list[float | None], list[Event]]:
        now = [0.0]

        def clock() -> float:
            now[0] += 1.0
            return now[0]

        waiting = ThreadWaiting(lambda: {1: share * now[0]}, clock=clock, processor_clock=lambda: 0.0)
        monkeypatch.setattr("workbench.engine.core.THREADS", waiting)
        runner = workbench.load("shape:tiny", backend="eager")
        heard: list[Event] = []
        runner.telemetry.listener = heard.append
        events = list(runner.stream([request()]))
        slept = waiting.sleeps
        if slept:
            waiting._pool.stop()
        assert slept is (share > SLEEP_ABOVE)
        return [event.logprob for event in of(Decoded, events)], heard

    spinning, heard = logprobs(0.0)
    assert not of(ThreadsChanged, heard)
    asleep, heard = logprobs(2.0)
    assert asleep == spinning and len(spinning) == 6
    (change,) = of(ThreadsChanged, heard)
    assert change.threads == 2 and "asleep" in change.reason


def request() -> workbench.Request:
    sampling = workbench.SamplingParameters(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    return workbench.Request("a", tuple(range(1, 40)), sampling)


def test_steps_of_a_rank_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []

    @contextmanager
    def step(device: torch.device) -> Iterator[None]:
        ran.append(f"a step begins on {device}")
        yield
        ran.append("it ends")

    monkeypatch.setattr(ranks, "THREADS", SimpleNamespace(step=step))
    monkeypatch.setattr(ranks, "from_arrays", lambda values, device: values)
    monkeypatch.setattr(ranks.RankPrograms, "compute", lambda self, *content: ran.append(content))
    model = cast(Any, SimpleNamespace(device=torch.device("cuda")))
    tasks = ranks.tasks_of(lambda: model, lambda *layout: cast(Any, None))
    tasks[ranks.OPEN_CACHE]((0, (), []))
    tasks[ranks.FORWARD]((0, "batch", ranks.BLOCKS, False))
    assert ran == ["a step begins on cuda", ("batch", ranks.BLOCKS, False), "it ends"]


@needs_libgomp
@pytest.mark.parametrize("name", VARIABLES)
def test_what_a_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "passive" if name == "OMP_WAIT_POLICY" else "7")
    assert not adaptable.__wrapped__()
    assert environment(with_torch=False, sample_seconds=0)["threads"][name] in ("passive", "7")


@needs_libgomp
def test_where_the_system_counts_no_time_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adaptable.__wrapped__()
    monkeypatch.setattr(thread_waiting, "Path", lambda *parts: SimpleNamespace(exists=lambda: False))
    assert not adaptable.__wrapped__()
