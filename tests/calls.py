"""Work counted, where a timing would depend on the machine: the calls that a piece of work makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from workbench.errors import WorkbenchError


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


def refusal_of(work: Callable[[], object]) -> tuple[str, int]:
    """Return the words of the WorkbenchError with which `work` ends, and how many functions it calls until then."""
    errors: list[str] = []

    def caught() -> None:
        try:
            work()
        except WorkbenchError as error:
            errors.append(str(error))

    calls = calls_of(caught)
    assert errors, "nothing was refused"
    return errors[0], calls
