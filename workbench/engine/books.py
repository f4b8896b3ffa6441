"""Serialize work on a runner's state: a step, a submission or a cancellation at a time.

A cancellation may arrive at any moment: from a listener during a step, from another thread or a timer while the model
computes, from a stream that is collected as garbage. While the lock is held it is recorded, and the holder carries it
out before anything else happens.

    cancel ---> recorded ---> at once, if the lock is free
                        \\---> within a step: between two events, and after the forward pass
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from workbench.engine.interrupts import HeldBack


class Books:
    """A lock around work on a runner: `with lock.acquire() as interrupts:`.

    Recorded work is carried out on release, and `on_release` is called last. An interrupt inside is deferred to the
    end, or to where `interrupts` allows it.
    """

    def __init__(self, noted: Callable[[], bool], heed: Callable[[], None], closing: Callable[[], None]):
        self._noted, self._heed, self._closing = noted, heed, closing
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that holds the lock

    def open(self) -> Opened:
        """Return the locked section; it waits for other threads. Within work of the same thread it is part of that
        work."""
        return Opened(self)

    def settle(self) -> None:
        """Carry out recorded work if the lock is free; otherwise its holder will."""
        if self._noted() and self._lock.acquire(blocking=False):
            self._holder = threading.get_ident()
            self._close()

    def _close(self) -> None:
        try:
            self._heed()
            self._closing()  # before another thread can take the lock: what it raises is this work's
        finally:
            self._holder = None
            self._lock.release()
            self.settle()  # recorded since


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
