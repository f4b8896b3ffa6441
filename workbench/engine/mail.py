"""Events on their way to whoever asked, under the name and number that they were asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from workbench.engine.best_of import BestOf
from workbench.trace.events import Event, Submitted


class Mail:
    """One box a stream, by the names of its requests; `tell` hears every event besides.

    A sample of a request with several has a name of its own here, and leaves under the request's id and its number.
    """

    def __init__(self, tell: Callable[[Event], None]):
        self._tell = tell
        self._boxes: dict[str, deque[Event]] = {}
        self._samples: dict[str, tuple[str, int]] = {}
        self._contests: dict[str, BestOf] = {}

    def open(self, name: str, box: deque[Event], sample_of: tuple[str, int] | None = None) -> None:
        """Events of `name` go to `box` from now on; `sample_of` is the request, and which of its samples this is."""
        self._boxes[name] = box
        if sample_of is not None:
            self._samples[name] = sample_of

    def hold(self, request_id: str, contest: BestOf) -> None:
        """What happens to the samples of a request is told as `contest` says, their submission at once."""
        self._contests[request_id] = contest

    def close(self, name: str) -> None:
        del self._boxes[name]
        self._samples.pop(name, None)

    def send(self, event: Event) -> None:
        box, events = self._boxes.get(event.request_id), [event]
        if event.request_id in self._samples:
            owner, number = self._samples[event.request_id]
            events = [replace(event, request_id=owner, sample=number)]
            contest = self._contests.get(owner)
            if contest is not None and not isinstance(event, Submitted):
                events = contest.add(events[0])
                if events:
                    del self._contests[owner]
        for told in events:
            self._tell(told)
            if box is not None:
                box.append(told)

    def names(self, box: deque[Event]) -> list[str]:
        """Whose events go to `box`."""
        return [name for name, owner in self._boxes.items() if owner is box]

    def samples(self, request_id: str) -> list[str]:
        """The names of a request's samples that are under way; its own, where it has no others."""
        return [name for name, (owner, _) in self._samples.items() if owner == request_id] or [request_id]
