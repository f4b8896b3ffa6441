"""Limits for tests that wait: seconds of this machine, as busy as it is, after which something counts as hung.

No test fails because a machine is slow. A test has 90 s of a quiet machine's time, a wait inside of it (`until`) 30;
both are scaled by how quick the machine is found when the run begins, and no limit reaches ten minutes. Where an
interface demands a number it is `limit(seconds)`: what the thing takes on the reference machine with nothing beside it,
scaled. `tools/lint/clocks.py` holds every test to this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SCALE = "WORKBENCH_TESTS_SCALE"  # measured once a run: pytest-xdist's workers and children of tests find it here
REFERENCE_SECONDS = 0.086  # what `_work` takes on the reference machine (Xeon with AMX, 2 cores, nothing beside it)
MIN_SCALE = 3.0  # others may begin to work after the measurement: three tests on two cores, and a browser
MAX_SCALE = 6.0
TEST_SECONDS, WAIT_SECONDS, MAX_SECONDS = 90.0, 30.0, 540.0


def limit(seconds: float) -> float:
    """Return the limit for what takes `seconds` on the reference machine: at least three times as many,
    and less than ten minutes."""
    return min(seconds * scale(), MAX_SECONDS)


def scale() -> float:
    """Return how many seconds of this machine stand for one of the reference machine: `MIN_SCALE` to `MAX_SCALE`."""
    if SCALE not in os.environ:
        os.environ[SCALE] = f"{min(MIN_SCALE * max(1.0, _work() / REFERENCE_SECONDS), MAX_SCALE):.3g}"
    return float(os.environ[SCALE])


def until(true: Callable[[], object], lives: Callable[[], bool] = lambda: True, seconds: float = WAIT_SECONDS) -> None:
    """Wait for an event that can only be looked for.

    Args:
        true: whether it has come.
        lives: whether what brings it about still runs.
        seconds: what it takes at most on the reference machine with nothing beside it.

    Raises:
        AssertionError: after `limit(seconds)`, or where what was to bring it about has ended.
    """
    end = time.monotonic() + limit(seconds)
    while not true():
        if not lives():
            if true():  # it came with the last act of what ended
                return
            raise AssertionError("what was to bring it about has ended")
        if time.monotonic() > end:
            raise AssertionError(f"it has not come in {limit(seconds):.0f} s")
        time.sleep(0.01)


def _work() -> float:
    """Time a fixed piece of interpreter's work: seconds, others' share of the processor among them."""
    began = time.perf_counter()
    total = 0
    for number in range(1_500_000):
        total += number * number & 255
    return time.perf_counter() - began
