"""Report work that takes long, and only that."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLOW_SECONDS = 3.0  # seconds


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def discard(line: str) -> None:
    """Discard the line, for output that must hold nothing else."""


@contextmanager
def report_if_slow(line: str, report: Callable[[str], None], seconds: float | None = None) -> Iterator[None]:
    """Report `line` once the block has taken `seconds` (3 unless given); nothing if it is over by then."""
    timer = threading.Timer(SLOW_SECONDS if seconds is None else seconds, report, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
