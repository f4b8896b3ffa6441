"""Keep what was submitted to a front, and give each sink the events of its requests, once and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from workbench.cluster.fleet_request import FleetRequest, SampleState
from workbench.engine import inputs as intake
from workbench.engine.runner_thread import EventSink
from workbench.errors import describe_error
from workbench.progress import to_stderr
from workbench.request import Request
from workbench.trace.events import Event

Called = TypeVar("Called")


@dataclass(eq=False)
class Submission:
    """Requests that were submitted together: one sink has their events."""

    sink: EventSink
    pending: list[FleetRequest]  # still to arrive, latest first
    is_single: bool
    live: dict[str, FleetRequest] = field(default_factory=dict)
    outbox: list[Event] = field(default_factory=list)
    error: str = ""
    is_heard: bool = True  # its sink has not raised


class Submissions:
    """All submissions that have not ended, and the requests of them that have arrived and not ended ("live").

    Attributes:
        listeners: called with every event, when it comes.
        after_delivery: called once when sinks have got what came for them.

    A listener, a callback or a sink that raises is called no more, and `report` gets a line: the others go on.
    """

    def __init__(self, report: Callable[[str], None] = to_stderr) -> None:
        self._report = report
        self.listeners: list[Callable[[Event], None]] = []
        self.after_delivery: list[Callable[[], None]] = []
        self._open: list[Submission] = []
        self._owner: dict[str, Submission] = {}  # by the id of a live request
        self._taken: set[str] = set()  # ids of all samples of live requests
        self._submitted = 0

    def __iter__(self) -> Iterator[Submission]:
        return iter(tuple(self._open))

    @property
    def num_live(self) -> int:
        """Return the number of live requests."""
        return len(self._owner)

    def add(self, sink: EventSink, requests: Iterable[Request], is_single: bool, now: float) -> Submission:
        """Return a new submission of requests, each of which arrives at its time after `now`."""
        made: list[FleetRequest] = []
        for request in sorted(requests, key=intake.arrival):
            made.append(FleetRequest(request, self._submitted, now + intake.arrival(request)))
            self._submitted += 1
        submission = Submission(sink, made[::-1], is_single)
        self._open.append(submission)
        return submission

    def next_arrival(self) -> float | None:
        """Return the time of the next arrival that is known; None without one."""
        return min((each.pending[-1].arrival for each in self._open if each.pending), default=None)

    def is_taken(self, each: FleetRequest) -> bool:
        """Return whether a live request has an id of this one or of its samples."""
        return not self._taken.isdisjoint(each.all_names)

    def enter(self, submission: Submission, each: FleetRequest) -> None:
        """Let a request be live."""
        self._owner[each.name] = submission
        self._taken |= each.all_names
        submission.live[each.name] = each

    def leave(self, each: FleetRequest) -> None:
        """Let a request that has ended be live no more."""
        del self._owner.pop(each.name).live[each.name]
        self._taken -= each.all_names

    def of(self, name: str) -> Submission:
        """Return the submission of the live request with this id."""
        return self._owner[name]

    # Events.

    def emit(self, event: Event) -> None:
        """Let the listeners hear an event."""
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception as error:
                self._drop(self.listeners, listener, error)

    def emit_of(self, each: FleetRequest, sample: SampleState | None, event: Event) -> None:
        """Emit an event of a live request, or of one sample of it."""
        event = replace(event, request_id=each.name, sample=0 if sample is None else sample.number)
        self._owner[each.name].outbox.append(event)
        self.emit(event)

    def add_steps(self, steps: Iterable[Event], names: Iterable[str]) -> None:
        """Give events of a whole step to the sinks of the live requests with these ids, and to those that get events
        anyway."""
        mine = {id(self._owner[name]) for name in names if name in self._owner}
        for each in self._open:
            if each.outbox or id(each) in mine:
                each.outbox += steps

    def deliver(self) -> None:
        """Give the sinks what came for them, and then call back once for all."""
        is_news = False
        for each in tuple(self._open):
            done = not each.live and not each.pending
            if each not in self._open or not each.outbox and not done:  # a sink may have had others delivered
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
