"""A first-in, first-out lock that can be given up while waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class FifoLock:
    """Fair lock: `enqueue` at once, `acquire` in a thread of one's own, `release` in any case, also after giving up."""

    def __init__(self) -> None:
        self._bell = threading.Condition()
        self._line: deque[object] = deque()

    def enqueue(self, owner: object) -> None:
        with self._bell:
            self._line.append(owner)

    def is_first(self, owner: object) -> bool:
        with self._bell:
            return bool(self._line) and self._line[0] is owner

    def acquire(self, owner: object, cancelled: Callable[[], bool]) -> bool:
        """Wait until the lock is held or `cancelled()`; return whether it is held.

        `cancelled` is tested again at each `notify`.
        """
        with self._bell:
            self._bell.wait_for(lambda: cancelled() or self._line[0] is owner)
            return not cancelled()

    def notify(self) -> None:
        with self._bell:
            self._bell.notify_all()

    def release(self, owner: object) -> None:
        with self._bell:
            self._line.remove(owner)
            self._bell.notify_all()
