"""A line for who waits: told only where the waiting takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG = 3.0  # seconds


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def to_nobody(line: str) -> None:
    """For output that is to hold nothing else."""


@contextmanager
def told_if_long(line: str, tell: Callable[[str], None], seconds: float | None = None) -> Iterator[None]:
    """Tell `line` once what is inside has taken `seconds` (`LONG` unless given); nothing where it is over by then."""
    timer = threading.Timer(LONG if seconds is None else seconds, tell, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
