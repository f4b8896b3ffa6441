"""Deliver events to the output queue of each stream, under the request id and sample number of the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from workbench.engine.best_of import BestOf
from workbench.trace.events import Event, Submitted


class OutputProcessor:
    """One output queue per stream, by request id; `emit` receives every event too.

    A sample of a request with several has an id of its own in the engine, and leaves with the request's id and its
    number.
    """

    def __init__(self, emit: Callable[[Event], None]):
        self._emit = emit
        self._queues: dict[str, deque[Event]] = {}
        self._samples: dict[str, tuple[str, int]] = {}
        self._best_of: dict[str, BestOf] = {}

    def add_request(self, name: str, queue: deque[Event], sample_of: tuple[str, int] | None = None) -> None:
        """Send events of `name` to `queue` from now on; `sample_of` is its request id and sample number."""
        self._queues[name] = queue
        if sample_of is not None:
            self._samples[name] = sample_of

    def defer(self, request_id: str, best_of: BestOf) -> None:
        """Defer the events of a request's samples, except their submission, as best-of-n requires."""
        self._best_of[request_id] = best_of

    def remove_request(self, name: str) -> None:
        del self._queues[name]
        self._samples.pop(name, None)

    def emit(self, event: Event) -> None:
        box, events = self._queues.get(event.request_id), [event]
        if event.request_id in self._samples:
            owner, number = self._samples[event.request_id]
            events = [replace(event, request_id=owner, sample=number)]
            contest = self._best_of.get(owner)
            if contest is not None and not isinstance(event, Submitted):
                events = contest.add(events[0])
                if events:
                    del self._best_of[owner]
        for each in events:
            self._emit(each)
            if box is not None:
                box.append(each)

    def request_ids_of(self, queue: deque[Event]) -> list[str]:
        """Return the request ids whose events go to `queue`."""
        return [name for name, owner in self._queues.items() if owner is queue]

    def sample_ids_of(self, request_id: str) -> list[str]:
        """Return the ids of a request's unfinished samples; its own id if it has no others."""
        return [name for name, (owner, _) in self._samples.items() if owner == request_id] or [request_id]
