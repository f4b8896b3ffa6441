"""Ctrl-C and a notebook's stop button: they come between two entries in the books, never within one.

Python may raise KeyboardInterrupt at any instruction of the main thread, in the midst of handing out pages too.
"""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# The module below `signal`: less its enums, which take twenty microseconds a step.
_raw: Any = importlib.import_module("_signal")
_set, _get = _raw.signal, _raw.getsignal


class HeldBack:
    """An interrupt that comes inside is raised at the end of it, or where it is `let_through`. In another thread than
    the main one, and where nobody listens to interrupts, nothing is changed: there none comes."""

    def __enter__(self) -> HeldBack:
        self._came: tuple[int, FrameType | None] | None = None
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            listens = _get(signal.SIGINT)
            if callable(listens):  # SIG_IGN and SIG_DFL are numbers here
                self._before = listens
                _set(signal.SIGINT, self._hold)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            _set(signal.SIGINT, self._before)
            self._raise()

    def let_through(self) -> LetThrough:
        """Inside, interrupts come as ever: for what takes long and may be left in the midst."""
        return LetThrough(self)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def _raise(self) -> None:
        came, self._came = self._came, None
        if came is not None:
            self._before(*came)


class LetThrough:
    def __init__(self, held: HeldBack):
        self._held = held

    def __enter__(self) -> None:
        if self._held._before is not None:
            _set(signal.SIGINT, self._held._before)
            self._held._raise()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._held._before is not None:
            _set(signal.SIGINT, self._held._hold)
