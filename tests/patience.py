"""Limits for tests that wait: seconds of this machine, as busy as it is, after which a test counts as hung.

No test fails because a machine is slow. What ends is waited for without a limit of its own (`until`, `.wait()`): the
limit of the test, which conftest takes from here, ends what hangs. Where an interface demands a number it is
`limit(seconds)`: what the thing takes on the reference machine with nothing beside it, scaled. `tests/test_time.py`
holds every test to this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SCALE = "WORKBENCH_TESTS_SCALE"  # measured once a run: pytest-xdist's workers and children of tests find it here
REFERENCE_SECONDS = 0.086  # what `_work` takes on the reference machine (Xeon with AMX, 2 cores, nothing beside it)
MIN_SCALE = 10.0  # others may begin to work after the measurement, and a limit costs nothing where nothing hangs
SLOWEST = 5.0  # times the reference machine: what hangs is to be ended all the same, within hours
TEST_SECONDS = 60.0  # for one test, on the reference machine: one that hangs must not take the time of all others


def limit(seconds: float) -> float:
    """Return the limit for what takes `seconds` on the reference machine: at least ten times as many."""
    return seconds * scale()


def scale() -> float:
    """Return how many seconds of this machine stand for one of the reference machine; at least `MIN_SCALE`."""
    if SCALE not in os.environ:
        os.environ[SCALE] = f"{MIN_SCALE * min(max(1.0, _work() / REFERENCE_SECONDS), SLOWEST):.3g}"
    return float(os.environ[SCALE])


def until(true: Callable[[], object], lives: Callable[[], bool] = lambda: True) -> None:
    """Wait for an event that can only be looked for; the test's limit ends it, or that `lives` is false.

    Args:
        true: whether it has come.
        lives: whether what brings it about still runs.
    """
    while not true():
        if not lives():
            if true():  # it came with the last act of what ended
                return
            raise AssertionError("what was to bring it about has ended")
        time.sleep(0.01)


def _work() -> float:
    """Time a fixed piece of interpreter's work: seconds, others' share of the processor among them."""
    began = time.perf_counter()
    total = 0
    for number in range(1_500_000):
        total += number * number & 255
    return time.perf_counter() - began
