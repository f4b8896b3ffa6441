"""A first-in, first-out lock that can be given up while waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Turns:
    """Fair lock: `enqueue` at once, `acquire` in a thread of one's own, `release` in any case, also after giving up."""

    def __init__(self) -> None:
        self._bell = threading.Condition()
        self._line: deque[object] = deque()

    def join(self, who: object) -> None:
        with self._bell:
            self._line.append(who)

    def first(self, who: object) -> bool:
        with self._bell:
            return bool(self._line) and self._line[0] is who

    def wait(self, who: object, gave_up: Callable[[], bool]) -> bool:
        """Wait until the lock is held or `cancelled()`; return whether it is held.

        `cancelled` is tested again at each `notify`.
        """
        with self._bell:
            self._bell.wait_for(lambda: gave_up() or self._line[0] is who)
            return not gave_up()

    def look(self) -> None:
        with self._bell:
            self._bell.notify_all()

    def leave(self, who: object) -> None:
        with self._bell:
            self._line.remove(who)
            self._bell.notify_all()
