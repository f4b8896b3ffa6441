"""Keep the submissions of a front or of pools, and give each sink the events of its requests, once and in order."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from workbench.cluster.fleet_request import FleetRequest, SampleState
from workbench.engine.runner_thread import EventSink
from workbench.errors import describe_error
from workbench.progress import to_stderr
from workbench.trace.events import Event

Called = TypeVar("Called")


@dataclass(eq=False)
class Submission:
    """Requests that were submitted together with one sink for their events."""

    sink: EventSink
    pending: list[FleetRequest]  # still to arrive, latest first
    is_single: bool = False
    live: dict[str, FleetRequest] = field(default_factory=dict)
    outbox: list[Event] = field(default_factory=list)
    error: str = ""
    is_heard: bool = True  # the sink has not raised


class Submissions:
    """All unfinished submissions, and their live requests (arrived and not ended).

    Attributes:
        waiting: live requests without a replica or engine, in the order of their arrivals.
        listeners: called with every event as it comes.
        after_delivery: called once after each delivery of events to sinks.

    A listener, callback or sink that raises is not called again, and `report` gets a line; the others continue.
    """

    def __init__(self, report: Callable[[str], None] = to_stderr) -> None:
        self._report = report
        self.waiting: list[FleetRequest] = []
        self.listeners: list[Callable[[Event], None]] = []
        self.after_delivery: list[Callable[[], None]] = []
        self._open: list[Submission] = []
        self._owner: dict[str, Submission] = {}  # by the id of a live request
        self._taken: set[str] = set()  # ids of all samples of live requests
        self._orders = itertools.count()

    def __iter__(self) -> Iterator[Submission]:
        return iter(tuple(self._open))

    @property
    def num_live(self) -> int:
        """Return the number of live requests."""
        return len(self._owner)

    @property
    def live(self) -> list[FleetRequest]:
        """Return the live requests, in the order in which they entered."""
        return [owner.live[name] for name, owner in self._owner.items()]

    def find(self, name: str) -> FleetRequest | None:
        """Return the live request with this id; None without one."""
        owner = self._owner.get(name)
        return owner and owner.live[name]

    def add(self, sink: EventSink, requests: Iterable[FleetRequest], is_single: bool = False) -> Submission:
        """Return a new submission of `requests`, which are numbered in the order of their arrivals."""
        made = sorted(requests, key=lambda each: each.arrival)
        for each in made:
            each.order = next(self._orders)
        self._open.append(Submission(sink, made[::-1], is_single))
        return self._open[-1]

    def due(self, now: float) -> Iterator[tuple[Submission, FleetRequest]]:
        """Yield the requests that have arrived by `now`, each with its submission; they are no longer pending."""
        for submission in self:
            while submission.pending and submission.pending[-1].arrival <= now:
                yield submission, submission.pending.pop()

    def next_arrival(self) -> float | None:
        """Return the time at which the next submitted request arrives; None if all have arrived."""
        return min((each.pending[-1].arrival for each in self._open if each.pending), default=None)

    def is_taken(self, each: FleetRequest) -> bool:
        """Return whether a live request already uses this request's id or the id of one of its samples."""
        return not self._taken.isdisjoint(each.all_names)

    def enter(self, submission: Submission, each: FleetRequest) -> None:
        """Add a live request, which waits."""
        self._owner[each.name] = submission
        self._taken |= each.all_names
        submission.live[each.name] = each
        self.wait(each)

    def wait(self, each: FleetRequest) -> None:
        """Let a live request wait, before those that arrived later."""
        bisect.insort(self.waiting, each, key=lambda other: (other.arrival, other.order))

    def leave(self, each: FleetRequest) -> None:
        """Remove a live request that has ended."""
        del self._owner.pop(each.name).live[each.name]
        self._taken -= each.all_names

    def of(self, name: str) -> Submission:
        """Return the submission of the live request with this id."""
        return self._owner[name]

    # Events.

    def emit(self, event: Event) -> None:
        """Call the listeners with an event."""
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception as error:
                self._drop(self.listeners, listener, error)

    def emit_of(self, each: FleetRequest, sample: SampleState | None, event: Event) -> None:
        """Emit an event of a live request, or of one sample of it."""
        self.emit_all(self._owner[each.name], each, [replace(event, sample=0 if sample is None else sample.number)])

    def emit_all(self, submission: Submission, each: FleetRequest, events: Iterable[Event]) -> None:
        """Emit events of a request, which may be refused, under its public id."""
        made = [each.named(event) for event in events]
        submission.outbox += made  # add all before a listener can cancel
        for event in made:
            self.emit(event)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event as it comes; return a function that stops it."""
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener) if listener in self.listeners else None

    def add_steps(self, steps: Iterable[Event], names: Iterable[str]) -> None:
        """Keep step events for the sinks of the live requests with these ids, and for sinks that have undelivered
        events.
        """
        mine = {id(self._owner[name]) for name in names if name in self._owner}
        for each in self._open:
            if each.outbox or id(each) in mine:
                each.outbox += steps

    def deliver(self) -> None:
        """Deliver pending events to the sinks, then call each callback once."""
        is_news = False
        for each in tuple(self._open):
            done = not each.live and not each.pending
            if each not in self._open or not each.outbox and not done:  # a sink may have triggered another delivery
                continue
            is_news = True
            events, each.outbox = each.outbox, []
            if done:
                self._open.remove(each)
            if each.is_heard:
                try:
                    each.sink.emit(events, done, each.error)
                except Exception as error:
                    each.is_heard = False
                    self._report(f"a sink raised, and gets no more events: {describe_error(error)}")
        if is_news:
            for callback in tuple(self.after_delivery):
                try:
                    callback()
                except Exception as error:
                    self._drop(self.after_delivery, callback, error)

    def _drop(self, called: list[Called], one: Called, error: Exception) -> None:
        if one in called:
            called.remove(one)
        self._report(f"{one!r} raised, and is called no more: {describe_error(error)}")
