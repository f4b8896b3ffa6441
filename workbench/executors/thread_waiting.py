"""Choose how the threads of an operator wait for each other: by spinning, or asleep if other processes occupy the
cores.

An operator ends when its last thread ends, and a step has hundreds of operators. libgomp, which runs the threads of
torch and of our kernels, lets early threads spin for milliseconds, which is fastest on a quiet machine. If another
process occupies a core, a spinning thread keeps the core from the thread it waits for, and a token takes up to thirty
times as long. Sleeping threads are fast then, but up to 2.5 times slower on a quiet machine. No fixed number of spins
suits both cases.

The rule: measure, per second of steps, how long this process's threads were ready to run but had no core, summed over
the threads (/proc/self/task/*/schedstat). Above `SLEEP_ABOVE` they sleep, below `SPIN_BELOW` they spin.

Only the waiting changes: the same number of threads compute the same parts, with the same bits. While libgomp has more
threads than this process has processors, it spins 100 times instead of 300,000; a pool of idle threads causes this
(`IdlePool`). If OMP_WAIT_POLICY or GOMP_SPINCOUNT is set, that choice is respected and no pool is started. If the
system refuses threads for a pool, threads spin from then on. A compiled step, which has the same bits on any number of
threads, may also switch to one thread (contention.py).

The times are in experiments/LOG.md (2026-11-28).
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch

from compiled_kernels.backends import BackendError
from compiled_kernels.mlir.invoke import libgomp_path

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # libgomp reads these variables once, when it is loaded
SLEEP_ABOVE, SPIN_BELOW = 0.4, 0.15  # seconds without a core, summed over threads, per second of steps
WINDOW_SECONDS = 0.1  # minimum seconds of steps between two measurements
WINDOW_COSTS = 100  # minimum interval, times the last measurement's cost (7 to 30 us per thread)
IDLE_SECONDS = 0.05  # maximum seconds between two steps; longer pauses are idle time


def sleeps_next(sleeps: bool, share: float) -> bool:
    """Return whether threads should sleep while they wait, from whether they sleep now and the fraction of time
    (`share`) in which they had no core.
    """
    return share >= SPIN_BELOW if sleeps else share > SLEEP_ABOVE


def coreless_seconds() -> dict[int, float]:
    """Return, by thread id, the seconds that each thread of this process was ready to run but had no core."""
    seconds = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
                seconds[int(thread)] = int(file.read().split()[1]) / 1e9
        except OSError:  # the thread has ended in the meantime
            continue
    return seconds


class IdlePool:
    """A pool of idle libgomp threads, so that libgomp has more threads than there are processors."""

    def __init__(self) -> None:
        self._ends: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the threads and return when all are running.

        Raise RuntimeError if the system refuses threads, OSError if libgomp cannot be loaded; then no thread runs.
        """
        count = len(os.sched_getaffinity(0)) + 1  # one more than the number that libgomp compares with
        _try_threads(count)
        running: Future[None] = Future()
        self._ends = threading.Event()
        arguments = count, running, self._ends
        self._thread = threading.Thread(target=_hold_pool, args=arguments, name="idle pool", daemon=True)
        self._thread.start()
        running.result()

    def stop(self) -> None:
        """End the threads of a started pool and return when the thread that owns the pool has ended."""
        assert self._ends is not None and self._thread is not None
        self._ends.set()
        self._thread.join()


def _try_threads(count: int) -> None:
    """Start `count` threads at once and end them; raise RuntimeError if the system refuses one.

    (libgomp itself would end the process in this case.)
    """
    ends, started = threading.Event(), []
    try:
        for _ in range(count):
            thread = threading.Thread(target=ends.wait, name="trial", daemon=True)
            thread.start()
            started.append(thread)
    finally:
        ends.set()
        for thread in started:
            thread.join()
            while Path(f"/proc/self/task/{thread.native_id}").exists():  # the system still counts the thread
                time.sleep(1e-4)


def _hold_pool(count: int, running: Future[None], ends: threading.Event) -> None:
    """Give this thread its own libgomp pool, which libgomp ends with the thread."""
    try:
        libgomp = ctypes.CDLL(libgomp_path())
        parallel = libgomp.GOMP_parallel
        parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        nothing = ctypes.cast(libgomp.omp_get_thread_num, ctypes.c_void_p)  # what each thread runs once
        parallel(nothing, None, count, 0)
    except BaseException as error:  # any exception: `start` waits for it
        running.set_exception(error)
        return
    running.set_result(None)
    ends.wait()


class ThreadWaiting:
    """The way in which this process's threads wait for each other; `step` reviews it after steps."""

    def __init__(
        self,
        coreless: Callable[[], Mapping[int, float]] = coreless_seconds,
        pool: IdlePool | None = None,
        clock: Callable[[], float] = time.perf_counter,
        processor_clock: Callable[[], float] = time.thread_time,
    ):
        self.sleeps = False
        self._coreless, self._pool = coreless, pool or IdlePool()
        self._clock, self._processor_clock = clock, processor_clock
        self._lock = threading.Lock()
        self._refused = False  # whether the system refused threads for a pool
        self._read = float("-inf")  # time of the last measurement
        self._began, self._seconds = 0.0, WINDOW_SECONDS  # start of the window, shifted by idle time
        self._without: Mapping[int, float] = {}  # coreless seconds at the start of the window
        self._left = float("-inf")  # end of the last step

    @contextmanager
    def step(self, device: torch.device, changed: Callable[[str], None] = lambda reason: None) -> Iterator[None]:
        """Count the enclosed code as a step of a model on `device`; call `changed(reason)` if the waiting mode changes
        after it, or cannot be changed.
        """
        if device.type != "cpu" or torch.get_num_threads() == 1 or self._refused or not adaptable():
            yield
            return
        with self._lock:
            self._skip_idle_time(self._clock())
        try:
            yield
        finally:
            with self._lock:
                self._left = self._clock()
                if self._left - self._began >= self._seconds:
                    self._look(changed)

    def _skip_idle_time(self, now: float) -> None:
        """Restart the window after idle time, unless the last measurement was too recent."""
        idle = now - self._left
        if idle <= IDLE_SECONDS:
            return
        if now - self._read >= self._seconds:
            self._begin_window()
        else:
            self._began += idle

    def _begin_window(self) -> None:
        before = self._processor_clock()  # time without a core would make windows long where they should be short
        self._without = self._coreless()
        self._seconds = max(WINDOW_SECONDS, WINDOW_COSTS * (self._processor_clock() - before))
        self._began = self._read = self._clock()

    def _look(self, changed: Callable[[str], None]) -> None:
        seconds, before = self._left - self._began, self._without
        self._begin_window()
        both = self._without.keys() & before.keys()  # other threads were started or ended in the meantime
        share = sum(self._without[thread] - before[thread] for thread in both) / seconds
        sleeps = sleeps_next(self.sleeps, share)
        if sleeps is self.sleeps:
            return
        how = f"{'asleep' if sleeps else 'spinning'}: they had no core for {share:.2f} s of a second of steps"
        try:
            (self._pool.start if sleeps else self._pool.stop)()
        except (OSError, RuntimeError) as error:
            self._refused = True
            changed(f"threads go on spinning, and cannot wait {how}; {error}")
            return
        self.sleeps = sleeps
        changed(f"threads wait for each other {how}")


@functools.cache
def adaptable() -> bool:
    """Return whether the way of waiting can be changed: libgomp is loaded, the system counts the time without a core,
    and no environment variable has set it.
    """
    if any(name in os.environ for name in VARIABLES) or not Path("/proc/self/schedstat").exists():
        return False
    try:
        return bool(libgomp_path())
    except BackendError:
        return False


THREADS = ThreadWaiting()
