"""SIGINT at any line of our own code: where Ctrl-C or a notebook's stop button may find it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
OURS = (f"{ROOT}/workbench", f"{ROOT}/compiled_kernels")


def lines_of(work: Callable[[], object]) -> int:
    """Return the number of the library's lines that `work` runs through."""
    return _traced(work, -1)[0]


def interrupted(work: Callable[[], object], line: int) -> bool:
    """Run `work` and send SIGINT at its line number `line`; whether it was left with KeyboardInterrupt."""
    return _traced(work, line)[1]


def _traced(work: Callable[[], object], line: int) -> tuple[int, bool]:
    count = 0

    def at_line(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count - 1 == line:
                signal.raise_signal(signal.SIGINT)
        return at_line

    def at_call(frame: FrameType, event: str, value: Any) -> Any:
        return at_line if frame.f_code.co_filename.startswith(OURS) else None

    before = sys.gettrace()
    try:
        sys.settrace(at_call)
        work()
    except KeyboardInterrupt:
        return count, True
    finally:
        sys.settrace(before)
    return count, False
