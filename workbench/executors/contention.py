"""Choose the number of threads of a compiled step: all, or one if other processes occupy the cores.

A step's threads wait for each other dozens of times by spinning. If another process occupies a core, they share the
remaining cores: a spinning thread keeps the core from the thread it waits for, and a step that takes 0.4 ms on a quiet
machine takes 90 ms. One thread takes 0.8 ms in either case. The code gives the same bits on any number of threads.

The rule, for each shape of step:

1. The first step runs on all threads, the second on one, to measure a single thread. 2. Then all threads, until
`SLOW_STEPS` steps in a row took more than `SLOWER` times as long as a single thread. 3. Then one thread, until its
steps have lasted `patience` times as long as the slower of those steps (at most `MAX_SECONDS`), and one step on all
threads as a probe. All threads stay if it took no longer than one thread's steps did on average; otherwise one thread
goes on with twice the patience, up to `MAX_PATIENCE`.

So probes cost at most a 16th of the time at first and a 64th in the end. Patience is the first again after
`CALM_STEPS` steps in a row on all threads that were not slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from workbench.units import format_seconds

SLOWER = 2.0
SLOW_STEPS = 2
FIRST_PATIENCE, MAX_PATIENCE = 16, 64
MAX_SECONDS = 10.0
CALM_STEPS = 64


@dataclass(frozen=True)
class Contention:
    """The choice of threads for one shape of step: measured times, and whether its steps run on one thread. Seconds are
    those of single steps, except `left` and `total`.
    """

    steps: int = 0
    one_thread: float = 0.0  # minimum seconds of a single-threaded step since the last switch to one thread
    slow: tuple[float, ...] = ()  # seconds of consecutive slow steps on all threads
    calm: int = 0  # number of consecutive steps on all threads that were not slow
    patience: int = FIRST_PATIENCE
    left: float | None = None  # remaining seconds of single-threaded steps; None while all threads run
    total: float = 0.0  # total seconds of single-threaded steps since the last switch
    count: int = 0  # number of these steps

    @property
    def single_threaded(self) -> bool:
        """Return whether the next step runs on one thread."""
        return self.steps == 1 or (self.left is not None and self.left > 0)


def after_step(state: Contention, seconds: float) -> Contention:
    """Return the state after the next step took `seconds`."""
    alone, state = state.single_threaded, replace(state, steps=state.steps + 1)
    if state.steps == 1:  # the first step runs with cold CPU caches
        return state
    if alone:
        return _after_one(state, seconds)
    if state.left is not None:
        return _after_probe(state, seconds)
    if seconds <= SLOWER * state.one_thread:
        calm = min(state.calm + 1, CALM_STEPS)
        return replace(state, slow=(), calm=calm, patience=FIRST_PATIENCE if calm == CALM_STEPS else state.patience)
    slow = (*state.slow, seconds)
    if len(slow) < SLOW_STEPS:
        return replace(state, slow=slow, calm=0)
    return _held(replace(state, slow=(), calm=0), state.patience, max(slow))


def _after_one(state: Contention, seconds: float) -> Contention:
    # The minimum of these steps only: the context was shorter in earlier ones.
    least = min(seconds, state.one_thread) if state.count else seconds
    left = None if state.left is None else state.left - seconds
    return replace(state, one_thread=least, left=left, total=state.total + seconds, count=state.count + 1)


def _after_probe(state: Contention, seconds: float) -> Contention:
    if seconds * state.count <= state.total:
        return replace(state, left=None, calm=1)
    return _held(state, min(2 * state.patience, MAX_PATIENCE), seconds)


def _held(state: Contention, patience: int, seconds: float) -> Contention:
    """Return the state that switches to one thread, after a step on all threads took `seconds`."""
    return replace(state, patience=patience, left=min(patience * seconds, MAX_SECONDS), total=0.0, count=0)


class StepThreads:
    """A runner of compiled steps, on one thread or on all of torch's threads as `after_step` decides. `changed(threads,
    reason)` is called when a shape of step switches to one thread and back.
    """

    def __init__(
        self,
        changed: Callable[[int, str], None] = lambda threads, reason: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._changed, self._clock = changed, clock
        self._states: dict[tuple[int, Hashable], Contention] = {}
        self.seconds = 0.0  # seconds of all calls since it was last set to 0

    def run(self, shape: Hashable, step: Callable[[int], None], steps: int = 1) -> float:
        """Call `step(threads)`, which computes `steps` steps of this shape, and return the seconds that it took."""
        most = torch.get_num_threads()
        state = self._states.get((most, shape), Contention())
        threads = 1 if state.single_threaded else most
        began = self._clock()
        step(threads)
        seconds = self._clock() - began
        self.seconds += seconds
        if most > 1:
            now = self._states[most, shape] = after_step(state, seconds / steps)
            if (now.left is None) != (state.left is None):
                self._report(shape, most, seconds / steps, state, now)
        return seconds

    def _report(self, shape: Hashable, most: int, seconds: float, state: Contention, now: Contention) -> None:
        took = f"{shape}: a step on {most} threads took {format_seconds(seconds)}"
        if now.left is not None:
            times = f"{took}, one thread {format_seconds(state.one_thread)}: other processes hold the cores"
            self._changed(1, f"{times}; tried again after {format_seconds(now.left)} of steps")
        else:
            self._changed(most, f"{took}, one thread {format_seconds(state.total / state.count)} on average")
