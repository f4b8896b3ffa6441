"""Choose how much is tried: `make test` has a sixth of the examples and fixed rows, `make test-thorough` all."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

THOROUGH = bool(os.environ.get("WORKBENCH_TESTS_THOROUGH"))  # set by `make test-thorough`
SHARE, FEWEST = 6, 3
SEED = "WORKBENCH_TESTS_SEED"  # set by conftest, the same in all processes of a run, and printed


def run_seed() -> int:
    """Return the random seed of this run: of what hypothesis draws (but in laws that compile), and of `some`."""
    return int(os.environ.setdefault(SEED, str(random.getrandbits(32))))


def tries(thorough: int) -> int:
    """Return the number of examples of a law that has `thorough` in `make test-thorough`."""
    return thorough if THOROUGH else max(min(thorough, FEWEST), thorough // SHARE)


def some(cases: Sequence[T], most: int) -> list[T]:
    """Return `most` of the cases, chosen by the run's random seed; all of them in `make test-thorough`."""
    return list(cases) if THOROUGH else random.Random(run_seed()).sample(cases, min(most, len(cases)))


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases of tests marked `sampled(most)` that `make test` leaves out: the same in every run, so that what
    they compile is found in the cache. `make test-thorough` tries all of them, and so does a run that names a test."""
    out: set[pytest.Item] = set()
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, cases in tests.items():
        if not THOROUGH and (marker := cases[0].get_closest_marker("sampled")):
            chosen = random.Random(test).sample(cases, min(marker.args[0], len(cases)))
            out |= set(cases) - set(chosen)
    return out
