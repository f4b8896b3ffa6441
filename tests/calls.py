"""Work counted, where a timing would depend on the machine: the calls that a piece of work makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions `work` calls, Python's and C's; itself is not counted."""
    count = 0

    def heard(frame: FrameType, event: str, value: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(heard)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count - 2  # `work` itself, and the last setprofile
