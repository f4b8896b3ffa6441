"""Collect the events of requests that one thread submits and the runner's thread computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from workbench.errors import WorkbenchError
from workbench.trace.events import Event
from workbench.waiting import wait_and_serve


class RequestHandle:
    """The handle of requests that were submitted together. `events` grows while they run, and includes the events of
    steps.

    Iterating waits for new events; leaving the loop early (an error, the stop button) cancels the requests.
    """

    def __init__(self, cancel: Callable[[], None]):
        """`cancel` is a function that cancels the requests soon; the serving thread reports events by `emit`."""
        self.events: list[Event] = []
        self.error = ""  # the error that ended all requests
        self._end = cancel
        self._news, self._done = threading.Condition(), False

    @property
    def done(self) -> bool:
        return self._done

    def stop(self) -> None:
        """Cancel the requests soon; each finishes with the reason `cancelled`. No effect if all are finished."""
        if not self._done:  # widgets are closed at interpreter shutdown, when no thread can be started
            self._end()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all requests are finished, at most `seconds`; return whether they are finished. The stop button
        cancels them.
        """
        try:
            return wait_and_serve(self._wait, seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _wait(self, seconds: float | None) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._done, seconds)

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        """Append `events`; after a call with `done` no more events follow."""
        with self._news:
            self.events += events
            self.error = self.error or error
            self._done = self._done or done
            self._news.notify_all()

    def __iter__(self) -> Iterator[Event]:
        events = self._iterate()
        next(events)  # closing a generator that has not begun would cancel nothing
        return events

    def _iterate(self) -> Iterator[Any]:
        place = 0
        try:
            yield
            while True:
                with self._news:
                    while not self._done and len(self.events) == place:
                        self._news.wait()
                    fresh, done = self.events[place:], self._done
                yield from fresh
                place += len(fresh)
                if done and place == len(self.events):
                    break
        finally:
            self.stop()
        if self.error:
            raise WorkbenchError(self.error)
