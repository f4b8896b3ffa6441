"""Choose how the threads of an operator wait for each other: by spinning, or asleep where other processes hold the
cores.

An operator ends when its last thread has, and a step has hundreds. libgomp, whose threads torch and our kernels run on,
lets the first spin for milliseconds: the quickest on a quiet machine. Beside a process that holds a core, the one that
spins keeps the core from the one it waits for, and a token takes up to thirty times as long. Threads that sleep are
then quick, but on a quiet machine up to 2.5 times slower. No fixed number of spins is good in both cases.

The rule: of the time that steps last, see how long this process's threads were ready to run but had no core, summed
over the threads (/proc/self/task/*/schedstat). Above `SLEEP_ABOVE` they sleep, below `SPIN_BELOW` they spin.

What changes is the waiting alone: as many threads compute the same parts, to the same bits. libgomp spins for 100
looks instead of 300,000 while it has more threads than this process may use processors; an idle pool of such threads
makes it so (`IdlePool`). Who sets OMP_WAIT_POLICY or GOMP_SPINCOUNT has chosen, and no pool is started. Where the
system gives no threads for one, threads spin from then on. A compiled step, whose bits are those of any number of
threads, goes over to one thread besides (contention.py).

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

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # libgomp reads them once, when it is loaded
SLEEP_ABOVE, SPIN_BELOW = 0.4, 0.15  # seconds without a core, of all threads, in a second of steps
WINDOW_SECONDS = 0.1  # of steps between two looks, at least
WINDOW_COSTS = 100  # times what the last look cost, at least: it takes 7 to 30 us a thread, and some have hundreds
IDLE_SECONDS = 0.05  # between two steps; more of them are no time of steps


def sleeps_next(sleeps: bool, share: float) -> bool:
    """Return whether threads sleep from now on, given whether they do and their share of time without a core."""
    return share >= SPIN_BELOW if sleeps else share > SLEEP_ABOVE


def coreless_seconds() -> dict[int, float]:
    """Return the seconds that each thread of this process has been ready to run and had no core, by thread id."""
    seconds = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
                seconds[int(thread)] = int(file.read().split()[1]) / 1e9
        except OSError:  # it has ended meanwhile
            continue
    return seconds


class IdlePool:
    """So many idle threads of libgomp that it has more than there are processors, while the pool runs."""

    def __init__(self) -> None:
        self._ends: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the threads and return when all run.

        Raise RuntimeError where the system gives fewer, OSError where libgomp cannot be loaded: then none runs.
        """
        count = len(os.sched_getaffinity(0)) + 1  # one more than what libgomp compares with
        _try_threads(count)
        running: Future[None] = Future()
        self._ends = threading.Event()
        arguments = count, running, self._ends
        self._thread = threading.Thread(target=_hold_pool, args=arguments, name="idle pool", daemon=True)
        self._thread.start()
        running.result()

    def stop(self) -> None:
        """End the threads of a started pool and return when the one that holds the others has ended."""
        assert self._ends is not None and self._thread is not None
        self._ends.set()
        self._thread.join()


def _try_threads(count: int) -> None:
    """Start so many threads at once and end them; raise RuntimeError where the system gives fewer.

    libgomp ends the process then.
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
            while Path(f"/proc/self/task/{thread.native_id}").exists():  # the system counts it still
                time.sleep(1e-4)


def _hold_pool(count: int, running: Future[None], ends: threading.Event) -> None:
    """Make this thread one with a pool of libgomp's own, which libgomp ends with it."""
    try:
        libgomp = ctypes.CDLL(libgomp_path())
        parallel = libgomp.GOMP_parallel
        parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        nothing = ctypes.cast(libgomp.omp_get_thread_num, ctypes.c_void_p)  # what each thread runs once
        parallel(nothing, None, count, 0)
    except BaseException as error:  # whatever it is, `start` waits for it
        running.set_exception(error)
        return
    running.set_result(None)
    ends.wait()


class ThreadWaiting:
    """The way in which this process's threads wait for each other: `step` looks at it after steps."""

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
        self._refused = False  # whether the system gave no threads for a pool
        self._read = float("-inf")  # when the last look was
        self._began, self._seconds = 0.0, WINDOW_SECONDS  # of the window; time between steps moves its beginning on
        self._without: Mapping[int, float] = {}  # at its beginning
        self._left = float("-inf")  # when the last step ended

    @contextmanager
    def step(self, device: torch.device, changed: Callable[[str], None] = lambda reason: None) -> Iterator[None]:
        """Count what is run meanwhile as a step of a model on `device`; call `changed(reason)` where threads wait in
        another way after it, or can not."""
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
        """Begin the window anew after time without steps, unless the last look was too short a while ago."""
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
        both = self._without.keys() & before.keys()  # the others have begun or ended meanwhile
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
    """Return whether threads can be made to wait in another way: libgomp is there, the system counts the time without
    a core, and no variable has chosen."""
    if any(name in os.environ for name in VARIABLES) or not Path("/proc/self/schedstat").exists():
        return False
    try:
        return bool(libgomp_path())
    except BackendError:
        return False


THREADS = ThreadWaiting()
