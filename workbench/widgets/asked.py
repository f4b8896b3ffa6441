"""What was asked of a runner together, as whoever asked sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from workbench.errors import WorkbenchError
from workbench.trace.events import Event


class Asked:
    """What was asked together. `events` grows while it is served, its steps' included; iterating waits for what comes,
    and leaving the loop early (an error, the stop button) ends the requests."""

    def __init__(self, end: Callable[[], None]):
        """`end` has the requests ended soon; who serves them tells what comes by `tell`."""
        self.events: list[Event] = []
        self.error = ""  # why it ended, where that was no end of a request
        self._end = end
        self._news, self._done = threading.Condition(), False

    @property
    def done(self) -> bool:
        return self._done

    def stop(self) -> None:
        """End the requests soon, wherever they are; each is told as Finished, cancelled. Nothing where all is done."""
        if not self._done:  # widgets are closed when Python ends, and then no thread can be begun
            self._end()

    def wait(self, seconds: float | None = None) -> bool:
        """Until all is done, or so many seconds: whether it is. The stop button ends the requests."""
        try:
            with self._news:
                return self._news.wait_for(lambda: self._done, seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def tell(self, events: list[Event], done: bool = False, error: str = "") -> None:
        """These came; when all is `done` nothing more will."""
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
