"""The books of a runner: one piece of work at a time writes in them, and nothing comes between two entries.

A step, a submission and a cancellation are such work. A cancellation may be asked for at any moment: by a listener in
the midst of a step, by another thread or a timer while the model computes, by a stream that is collected as garbage.
Where the books are open it is noted, and whoever has them open carries it out before anything else happens.

    cancel ---> noted ---> at once, where the books are closed
                     \\---> where a step heeds it: between two events, and after the forward pass
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from workbench.engine.interrupts import HeldBack


class Books:
    """`with books.open() as held:` around work; `heed` carries out what was noted, `closing` comes when all is done.

    An interrupt is held back inside, and raised at the end of it or where `held` lets it through."""

    def __init__(self, noted: Callable[[], bool], heed: Callable[[], None], closing: Callable[[], None]):
        self._noted, self._heed, self._closing = noted, heed, closing
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has them open

    def open(self) -> Opened:
        """Waits while another thread has them open. Within work of the same thread it is part of that work."""
        return Opened(self)

    def settle(self) -> None:
        """Carry out what was noted, if the books are closed; else whoever has them open will."""
        if self._noted() and self._lock.acquire(blocking=False):
            self._holder = threading.get_ident()
            self._close()

    def _close(self) -> None:
        try:
            self._heed()
            self._closing()  # before another thread can have them open: what it raises is this work's
        finally:
            self._holder = None
            self._lock.release()
            self.settle()  # what was noted since


class Opened:
    def __init__(self, books: Books):
        self._books, self._held = books, HeldBack()

    def __enter__(self) -> HeldBack:
        books = self._books
        held = self._held.__enter__()
        self._within = books._holder == threading.get_ident()
        if not self._within:
            books._lock.acquire()
            books._holder = threading.get_ident()
        return held

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> Any:
        try:
            if not self._within:
                self._books._close()
        finally:
            self._held.__exit__(kind, error, at)
