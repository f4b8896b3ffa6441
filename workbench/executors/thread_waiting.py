"""Choose how the threads of an operator wait for each other: by spinning, or asleep where other processes hold the
cores.

An operator ends when its last thread has, and a step has hundreds. libgomp, whose threads torch and our kernels run on,
lets the first spin for milliseconds: the quickest on a quiet machine. Beside a process that holds a core, the one that
spins keeps the core from the one it waits for, and a token takes up to thirty times as long. Threads that sleep are
then quick, but on a quiet machine up to 2.5 times slower. No fixed number of spins is good in both cases.

The rule: of the time that steps last, see how long this process's threads were ready to run but had no core, summed
over the threads (/proc/self/task/*/schedstat). Above `SLEEP_ABOVE` they sleep, below `SPIN_BELOW` they spin.

What changes is the waiting alone: as many threads compute the same parts, to the same bits. libgomp spins for 100
looks instead of 300,000 while it has more threads than the machine has processors; an idle pool of such threads makes
it so (`IdlePool`). Who sets OMP_WAIT_POLICY or GOMP_SPINCOUNT has chosen, and no pool is started. A compiled step,
whose bits are those of any number of threads, goes over to one thread besides (contention.py).

The times are in experiments/LOG.md (2026-11-28).
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from compiled_kernels.backends import BackendError
from compiled_kernels.mlir.invoke import libgomp_path

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # libgomp reads them once, when it is loaded
SLEEP_ABOVE, SPIN_BELOW = 0.4, 0.15  # seconds without a core, of all threads, in a second of steps
WINDOW_SECONDS = 0.1  # of steps between two looks: one takes about 0.3 ms
IDLE_SECONDS = 0.05  # between two steps; after more of them a window begins anew


def sleeps_next(sleeps: bool, share: float) -> bool:
    """Return whether threads sleep from now on, given whether they do and their share of time without a core."""
    return share >= SPIN_BELOW if sleeps else share > SLEEP_ABOVE


def coreless_seconds() -> float:
    """Return the seconds that this process's threads have been ready to run and had no core."""
    total = 0
    for entry in os.scandir("/proc/self/task"):
        try:
            total += int(Path(entry.path, "schedstat").read_bytes().split()[1])
        except OSError:  # it has ended meanwhile
            continue
    return total / 1e9


class IdlePool:
    """So many idle threads of libgomp that it has more than there are processors, while the pool runs."""

    def __init__(self) -> None:
        self._ends: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        ready, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=_hold_pool, args=(ready, self._ends), name="idle pool", daemon=True)
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        assert self._ends is not None and self._thread is not None
        self._ends.set()
        self._thread.join()


def _hold_pool(ready: threading.Event, ends: threading.Event) -> None:
    """Make this thread one with a pool of libgomp's own, which libgomp ends with it."""
    libgomp = ctypes.CDLL(libgomp_path())
    parallel = libgomp.GOMP_parallel
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    nothing = ctypes.cast(libgomp.omp_get_thread_num, ctypes.c_void_p)  # what each thread runs once
    parallel(nothing, None, (os.cpu_count() or 1) + 1, 0)
    ready.set()
    ends.wait()


class ThreadWaiting:
    """The way in which this process's threads wait for each other: `step` looks at it after steps."""

    def __init__(
        self,
        coreless: Callable[[], float] = coreless_seconds,
        pool: IdlePool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.sleeps = False
        self._coreless, self._pool, self._clock = coreless, pool or IdlePool(), clock
        self._lock = threading.Lock()
        self._began, self._without = 0.0, 0.0  # of the window
        self._left = float("-inf")  # when the last step ended

    @contextmanager
    def step(self, changed: Callable[[str], None] = lambda reason: None) -> Iterator[None]:
        """Count what is run meanwhile as a step; call `changed(reason)` where threads wait in another way after it."""
        if torch.get_num_threads() == 1 or not adaptable():
            yield
            return
        with self._lock:
            if self._clock() - self._left > IDLE_SECONDS:
                self._begin_window()
        try:
            yield
        finally:
            with self._lock:
                self._left = self._clock()
                if self._left - self._began >= WINDOW_SECONDS:
                    self._look(changed)

    def _begin_window(self) -> None:
        self._began, self._without = self._clock(), self._coreless()

    def _look(self, changed: Callable[[str], None]) -> None:
        began, without = self._began, self._without
        self._begin_window()
        share = (self._without - without) / (self._began - began)
        if sleeps_next(self.sleeps, share) is self.sleeps:
            return
        self.sleeps = not self.sleeps
        (self._pool.start if self.sleeps else self._pool.stop)()
        how = "asleep" if self.sleeps else "spinning"
        changed(f"threads wait for each other {how}: they had no core for {share:.2f} s of a second of steps")


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
