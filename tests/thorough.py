"""Choose how much is tried: `make test-thorough` has all; `make test` a sixth of the examples, some of slow cases."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

THOROUGH = bool(os.environ.get("WORKBENCH_TESTS_THOROUGH"))  # set by `make test-thorough`
SHARE, FEWEST = 6, 3
RUN = "PYTEST_XDIST_TESTRUNUID"  # of `make test`, the same in all of its processes
_alone = f"{random.getrandbits(64):x}"  # of a run in this process alone


def tries(thorough: int) -> int:
    """Return the number of examples of a law that has `thorough` in `make test-thorough`."""
    return thorough if THOROUGH else max(min(thorough, FEWEST), thorough // SHARE)


def some(cases: Sequence[T], most: int) -> list[T]:
    """Return `most` of the cases, others in every run; all of them in `make test-thorough`.

    All processes of a run draw the same ones: pytest-xdist wants one list of tests."""
    draw = random.Random(os.environ.get(RUN, _alone))
    return list(cases) if THOROUGH else draw.sample(cases, min(most, len(cases)))


def how_to_repeat(testrunuid: str | None) -> str:
    """Return how a run is begun that chooses as this one did, of processes with `testrunuid` or of this one alone."""
    return f"--testrunuid={testrunuid}" if testrunuid else f"{RUN}={os.environ.get(RUN, _alone)}"


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases of tests marked `sampled(most)` that this run of `make test` leaves out: others in every run.

    `make test-thorough`, and a file that is run by itself, try all of them."""
    out: set[pytest.Item] = set()
    if THOROUGH or RUN not in os.environ:
        return out
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, cases in tests.items():
        if marker := cases[0].get_closest_marker("sampled"):
            draw = random.Random(f"{os.environ[RUN]} {os.environ.get('WORKBENCH_LEVEL')} {test}")
            out |= set(cases) - set(draw.sample(cases, min(marker.args[0], len(cases))))
    return out
