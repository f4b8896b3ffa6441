"""Defer interrupts.

Python may raise KeyboardInterrupt at any instruction of the main thread, in the middle of an allocation too.
`DeferInterrupts` delays it to the end of a block of work.
"""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# The C module below `signal`, without its enums, which take twenty microseconds per step.
_raw: Any = importlib.import_module("_signal")
_set, _get = _raw.signal, _raw.getsignal


class DeferInterrupts:
    """A context manager that defers an interrupt to the end of its block, or to a part of the block that may be
    interrupted (`allow`).

    No effect outside of the main thread, or if interrupts have no handler, since no interrupt arrives there.
    """

    def __enter__(self) -> DeferInterrupts:
        self._pending: tuple[int, FrameType | None] | None = None
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            listens = _get(signal.SIGINT)
            if callable(listens):  # SIG_IGN and SIG_DFL are numbers here
                self._before = listens
                _set(signal.SIGINT, self._defer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            _set(signal.SIGINT, self._before)
            self._raise()

    def allow(self) -> AllowInterrupts:
        """Return a context manager in which interrupts arrive as usual, for long work that may be interrupted."""
        return AllowInterrupts(self)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._pending = number, frame

    def _raise(self) -> None:
        came, self._pending = self._pending, None
        if came is not None:
            self._before(*came)


class AllowInterrupts:
    def __init__(self, held: DeferInterrupts):
        self._held = held

    def __enter__(self) -> None:
        if self._held._before is not None:
            _set(signal.SIGINT, self._held._before)
            self._held._raise()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._held._before is not None:
            _set(signal.SIGINT, self._held._defer)
