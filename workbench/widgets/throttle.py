"""Limit the redraws of a picture to ten per second."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

MIN_REDRAW_INTERVAL_SECONDS = 0.1  # from the end of one redraw to the begin of the next: at most ten a second
REST_FACTOR = 3  # pause after a redraw, in multiples of its duration: leaves time for an engine in this process


_ALL: weakref.WeakSet[Throttle] = weakref.WeakSet()


def flush_all() -> None:
    """Draw every pending redraw of all widgets of this process now."""
    for throttle in tuple(_ALL):
        throttle.flush_pending()


class Throttle:
    """A throttle that calls `draw` soon after `mark`, in its own thread, at most ten times a second.

    The last mark is always drawn. `flush` draws at once, in the calling thread; after `stop` neither does anything.
    """

    def __init__(self, draw: Callable[[], None], seconds: float = MIN_REDRAW_INTERVAL_SECONDS):
        self._draw, self._seconds = draw, seconds
        self._state, self._drawing = threading.Lock(), threading.RLock()
        self._timer: threading.Timer | None = None
        self._later: threading.Timer | None = None
        self._next, self._stopped = 0.0, False
        _ALL.add(self)

    def mark(self) -> None:
        with self._state:
            if self._timer is not None or self._stopped:
                return
            self._timer = threading.Timer(max(0.0, self._next - time.monotonic()), self._on_timer)
            self._timer.daemon = True
            self._timer.start()

    def mark_later(self, seconds: float) -> None:
        """Call `mark` after `seconds`; this replaces an earlier pending `mark_later`."""
        with self._state:
            if self._later is not None:
                self._later.cancel()
                self._later = None
            if not self._stopped:
                self._later = threading.Timer(seconds, self.mark)
                self._later.daemon = True
                self._later.start()

    def flush(self) -> None:
        """Draw the present state at once, in the calling thread."""
        with self._state:
            if self._stopped:
                return
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._redraw()

    def flush_pending(self) -> None:
        """Draw if a mark is pending, and wait for a redraw that is under way."""
        with self._state:
            marked = self._timer is not None
        if marked:
            self.flush()
        with self._drawing:
            pass

    def stop(self) -> None:
        with self._state:
            self._stopped = True
            for timer in (self._timer, self._later):
                if timer is not None:
                    timer.cancel()
            self._timer = self._later = None

    def _on_timer(self) -> None:
        with self._state:
            self._timer = None  # before drawing: a mark during the redraw causes another one
            self._next = time.monotonic() + self._seconds  # an earlier redraw may still run: `_drawing` waits for it
        with self._drawing:
            if not self._stopped:
                self._redraw()

    def _redraw(self) -> None:
        with self._drawing:
            began = time.monotonic()
            self._draw()
            ended = time.monotonic()
            with self._state:
                self._next = ended + max(self._seconds, REST_FACTOR * (ended - began))
