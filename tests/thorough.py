"""Choose how much a law tries: in `make test` a quarter of what it does in `make test-thorough`. Both try every law."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

THOROUGH = bool(os.environ.get("WORKBENCH_TESTS_THOROUGH"))  # set by `make test-thorough`
SHARE, FEWEST = 4, 3


def tries(thorough: int) -> int:
    """Return the number of examples of a law that has `thorough` in `make test-thorough`."""
    return thorough if THOROUGH else max(min(thorough, FEWEST), thorough // SHARE)


def some(cases: Sequence[T], most: int) -> list[T]:
    """Return `most` of the cases, others in every run; all of them in `make test-thorough`.

    All processes of a run draw the same ones: pytest-xdist wants one list of tests."""
    draw = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # None: any
    return list(cases) if THOROUGH else draw.sample(cases, min(most, len(cases)))
