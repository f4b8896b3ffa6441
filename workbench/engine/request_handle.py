"""Hold what a runner's thread reports of requests that another thread submitted together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from workbench.errors import WorkbenchError
from workbench.trace.events import Event
from workbench.waiting import wait_and_serve


class RequestHandle:
    """Requests submitted together. `events` grows while they are served, with their steps' events.

    Iterating waits for new events; leaving the loop early (an error, the stop button) cancels the requests.
    """

    def __init__(self, cancel: Callable[[], None]):
        """`cancel` cancels the requests soon; the server reports events by `emit`."""
        self.events: list[Event] = []
        self.error = ""  # why it ended, where that was no end of a request
        self._end = cancel
        self._news, self._done = threading.Condition(), False

    @property
    def done(self) -> bool:
        return self._done

    def stop(self) -> None:
        """Cancel the requests soon; each finishes with the reason `cancelled`. Does nothing where all are finished."""
        if not self._done:  # widgets are closed when Python ends, and then no thread can be begun
            self._end()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all requests are finished, or `seconds`; return whether they are. The stop button cancels them."""
        try:
            return wait_and_serve(self._wait, seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _wait(self, seconds: float | None) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._done, seconds)

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        """Append `events`; after `done` there are no more."""
        with self._news:
            self.events += events
            self.error = self.error or error
            self._done = self._done or done
            self._news.notify_all()

    def __iter__(self) -> Iterator[Event]:
        place = 0
        try:
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
