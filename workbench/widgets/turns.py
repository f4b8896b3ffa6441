"""Who wants a thing for itself has it in the order of asking."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Turns:
    """`join` at once, `wait` in a thread of one's own, `leave` in any case, also where one gave up waiting."""

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
        """Until all who joined before have left, or `gave_up` (asked again at each `look`): whether it is our turn."""
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
