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

from workbench.engine.interrupts import DeferInterrupts


class StepLock:
    """A lock around work on a runner: `with lock.acquire() as interrupts:`.

    Recorded work is carried out on release, and `on_release` is called last. An interrupt inside is deferred to the
    end, or to where `interrupts` allows it.
    """

    def __init__(self, has_pending: Callable[[], bool], process: Callable[[], None], on_release: Callable[[], None]):
        self._has_pending, self._process, self._on_release = has_pending, process, on_release
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that holds the lock

    def acquire(self) -> LockedSection:
        """Return the locked section; it waits for other threads. Within work of the same thread it is part of that
        work."""
        return LockedSection(self)

    def process_pending(self) -> None:
        """Carry out recorded work if the lock is free; otherwise its holder will."""
        if self._has_pending() and self._lock.acquire(blocking=False):
            self._holder = threading.get_ident()
            self._release()

    def _release(self) -> None:
        try:
            self._process()
            self._on_release()  # before another thread can take the lock: what it raises is this work's
        finally:
            self._holder = None
            self._lock.release()
            self.process_pending()  # recorded since


class LockedSection:
    def __init__(self, books: StepLock):
        self._books, self._held = books, DeferInterrupts()

    def __enter__(self) -> DeferInterrupts:
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
                self._books._release()
        finally:
            self._held.__exit__(kind, error, at)
