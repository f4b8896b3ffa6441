"""Compute the state of a fleet from its events: the place of each sample, each replica's pages, routing decisions.

A sample is in one place: at the front, at a replica, in flight between two replicas, or ended. A cluster, two pools, a
simulated fleet and a record of any of them emit the same events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.request import FinishReason
from workbench.trace.events import (
    Decoded,
    Event,
    Finished,
    HandedOver,
    Moved,
    Preempted,
    Prefilled,
    Routed,
    Scheduled,
    Stepped,
    Submitted,
)
from workbench.units import format_bytes, format_seconds

KEPT_NEWS = 200  # last routings, moves and handovers that are kept
KEPT_ENDED = 200  # last ended samples that are kept
FRONT, REPLICA, IN_FLIGHT, ENDED = "front", "replica", "in flight", "ended"
HOLDING = ("serves", "leaves")  # states in which a replica keeps its samples; in others they return to the front
News = Routed | Moved | HandedOver
Key = tuple[str, int]  # request id, sample


@dataclass(frozen=True)
class FleetSample:
    """A sample of a request: its place and its progress.

    Args:
        request_id: id of its request.
        number: index of the sample in its request.
        place: front, replica, in flight (its pages are between two replicas), or ended.
        replica: number of its replica, or in flight of its target; 0 if unknown.
        source: number of the replica that it left, while in flight.
        phase: waiting, prefill or decode; for an ended sample the reason.
        prompt_tokens: prompt tokens of its request.
        output_tokens: emitted tokens.
        pages: pages in flight.
        moves: number of replicas that it had to leave.
    """

    request_id: str
    number: int = 0
    place: str = FRONT
    replica: int = 0
    source: int = 0
    phase: str = "waiting"
    prompt_tokens: int = 0
    output_tokens: int = 0
    pages: int = 0
    moves: int = 0

    @property
    def key(self) -> Key:
        return self.request_id, self.number

    @property
    def name(self) -> str:
        return f"{self.request_id}#{self.number}" if self.number else self.request_id


@dataclass(frozen=True)
class FleetMember:
    """The data of a replica that a fleet reports by itself, not in events.

    Args:
        number: number of the replica.
        role: prefill or decode in pools; else a variant's name or "".
        state: serves, starts, leaves, ...
        pages: total number of pages; None if unknown.
        used: pages held by sequences; None: take the number from the replica's last step.
        idle: pages held by the prefix cache alone; None: take the number from the replica's last step.
    """

    number: int
    role: str = ""
    state: str = "serves"
    pages: int | None = None
    used: int | None = None
    idle: int | None = None


class PagesOnTheWay(NamedTuple):
    """The pages of a sample that are in transfer between two replicas; `replica` is 0 before a target is chosen."""

    key: Key
    source: int
    replica: int
    pages: int


@dataclass(frozen=True)
class FleetReplica:
    """A replica with its samples, and its pages after its last step. `free` is None if the total is unknown."""

    number: int
    role: str = ""
    state: str = "serves"
    samples: tuple[FleetSample, ...] = ()
    used: int = 0
    idle: int = 0
    free: int | None = None
    steps: int = 0
    output_tokens: int = 0

    @property
    def pages(self) -> int | None:
        return None if self.free is None else self.used + self.idle + self.free


@dataclass(frozen=True)
class FleetState:
    """The state of a fleet at `time`, in seconds on the events' clock; `began` is the time of its first event. `news`
    holds the latest routings, moves and handovers."""

    time: float = 0.0
    began: float = 0.0
    replicas: tuple[FleetReplica, ...] = ()
    waiting: tuple[FleetSample, ...] = ()
    in_flight: tuple[FleetSample, ...] = ()
    ended: tuple[FleetSample, ...] = ()
    num_ended: dict[str, int] = field(default_factory=dict)  # by reason
    news: tuple[News, ...] = ()
    num_handed_over: int = 0
    pages_handed_over: int = 0
    bytes_handed_over: int = 0

    @property
    def samples(self) -> Iterator[FleetSample]:
        """Yield all samples that are still kept, each once."""
        yield from self.waiting
        for each in self.replicas:
            yield from each.samples
        yield from self.in_flight
        yield from self.ended


class FleetBook:
    """A fleet's state that is updated by each of its events, in order."""

    def __init__(self) -> None:
        self.time = self.began = 0.0
        self._samples: dict[Key, FleetSample] = {}  # samples that have not ended
        self._ended: deque[FleetSample] = deque(maxlen=KEPT_ENDED)
        self._num_ended: dict[str, int] = {}
        self._replicas: dict[int, FleetReplica] = {}
        self._news: deque[News] = deque(maxlen=KEPT_NEWS)
        self._handed = (0, 0, 0)  # samples, pages, bytes
        self._is_empty = True

    def take(self, event: Event) -> None:
        """Update the state by the next event."""
        if self._is_empty:
            self.began, self._is_empty = event.time, False
        self.time = max(self.time, event.time)
        if isinstance(event, Stepped):
            self._step(event)
        elif event.request_id:
            self._of_sample(event)
        if isinstance(event, News):
            self._news.append(event)
        if isinstance(event, HandedOver):
            count, pages, size = self._handed
            self._handed = count + 1, pages + event.pages, size + event.bytes

    def state(
        self, members: Iterable[FleetMember] | None = None, in_flight: Iterable[PagesOnTheWay] = ()
    ) -> FleetState:
        """Return the present state as a value.

        Args:
            members: the existing replicas; any other replica of the events is lost, and its samples wait at the front.
                None: take the replicas from the events.
            in_flight: pages between two replicas, by sample.
        """
        replicas = dict(self._replicas)
        if members is not None:
            known = {each.number: each for each in members}
            replicas = {number: replace(each, state="lost") for number, each in replicas.items()} | {
                number: _with_member(replicas.get(number, FleetReplica(number)), each) for number, each in known.items()
            }
        replicas = {number: each if each.state in HOLDING else replace(each, used=0, idle=0, free=None)
                    for number, each in replicas.items()}  # fmt: skip
        on_the_way = {each.key: each for each in in_flight}
        for way in on_the_way.values():
            for number, role in ((way.source, "prefill"), (way.replica, "decode")):
                if number in replicas and not replicas[number].role:
                    replicas[number] = replace(replicas[number], role=role)
        placed = [self._placed(each, replicas, on_the_way.get(each.key)) for each in self._samples.values()]
        held = {number: [each for each in placed if each.place == REPLICA and each.replica == number]
                for number in replicas}  # fmt: skip
        return FleetState(
            self.time, self.began,
            tuple(replace(replicas[number], samples=tuple(held[number])) for number in sorted(replicas)),
            tuple(each for each in placed if each.place == FRONT),
            tuple(each for each in placed if each.place == IN_FLIGHT),
            tuple(self._ended), dict(self._num_ended), tuple(self._news), *self._handed,
        )  # fmt: skip

    def _placed(self, sample: FleetSample, replicas: dict[int, FleetReplica], way: PagesOnTheWay | None) -> FleetSample:
        if way is not None:
            return replace(sample, place=IN_FLIGHT, source=way.source, replica=way.replica, pages=way.pages)
        if sample.place == REPLICA and replicas[sample.replica].state not in HOLDING:
            return replace(sample, place=FRONT, phase="waiting")
        return sample

    def _replica(self, number: int) -> FleetReplica:
        return self._replicas.setdefault(number, FleetReplica(number))

    def _step(self, event: Stepped) -> None:
        mine = self._replica(event.replica)
        self._replicas[event.replica] = replace(
            mine, used=event.pages_used, idle=event.pages_idle, steps=mine.steps + 1, state="serves"
        )

    def _of_sample(self, event: Event) -> None:
        key = event.request_id, event.sample
        mine = self._samples.get(key)
        if isinstance(event, Finished) and event.reason != FinishReason.MOVED:
            self._samples.pop(key, None)
            mine = mine or FleetSample(*key, prompt_tokens=event.prompt_tokens)
            self._ended.append(replace(
                mine, place=ENDED, phase=event.reason, output_tokens=max(mine.output_tokens, len(event.token_ids))
            ))  # fmt: skip
            self._num_ended[event.reason] = self._num_ended.get(event.reason, 0) + 1
            return
        if mine is None:
            if not isinstance(event, Submitted | Routed | Moved | HandedOver | Scheduled | Prefilled | Decoded):
                return
            mine = FleetSample(*key)
        self._samples[key] = self._changed(mine, event)

    def _changed(self, mine: FleetSample, event: Event) -> FleetSample:
        """Return a sample after an event of its own."""
        match event:
            case Submitted():
                mine = replace(mine, prompt_tokens=event.prompt_tokens)
                return self._at(mine, event.replica) if event.replica else mine
            case Routed():
                return self._at(mine, event.replica)
            case Moved():
                self._replicas[event.source] = replace(self._replica(event.source), state="lost")
                return self._at(replace(mine, moves=mine.moves + 1, phase="waiting"), event.replica)
            case HandedOver():
                self._replicas[event.source] = replace(self._replica(event.source), role="prefill")
                self._replicas[event.replica] = replace(self._replica(event.replica), role="decode")
                return self._at(mine, event.replica)
            case Prefilled():
                return self._at(replace(mine, phase="prefill"), event.replica)
            case Decoded():
                self._replicas[event.replica] = replace(
                    self._replica(event.replica), output_tokens=self._replica(event.replica).output_tokens + 1
                )
                tokens = max(mine.output_tokens, event.index + 1)
                return self._at(replace(mine, phase="decode", output_tokens=tokens), event.replica)
            case Preempted() | Scheduled(action="waiting"):
                return self._at(replace(mine, phase="waiting"), event.replica)
            case Scheduled():
                return self._at(mine, event.replica)
        return mine

    def _at(self, mine: FleetSample, number: int) -> FleetSample:
        self._replicas[number] = replace(self._replica(number), state="serves")
        return replace(mine, place=REPLICA, replica=number)


def state_at(events: Sequence[Event], time: float, members: Iterable[FleetMember] | None = None) -> FleetState:
    """Return the state of a recorded fleet at `time`: after all events up to then, with the pages of handovers that
    were under way."""
    book, ways = FleetBook(), {}
    for event in events:
        if event.time <= time:
            book.take(event)
        elif isinstance(event, HandedOver) and event.time - event.seconds <= time:
            key = event.request_id, event.sample
            ways[key] = PagesOnTheWay(key, event.source, event.replica, event.pages)
    book.time = max(time, book.time)
    return book.state(members, ways.values())


def _with_member(replica: FleetReplica, member: FleetMember) -> FleetReplica:
    used = replica.used if member.used is None else member.used
    idle = replica.idle if member.idle is None else member.idle
    free = None if member.pages is None else max(0, member.pages - used - idle)
    role = member.role or replica.role
    return replace(replica, role=role, state=member.state, used=used, idle=idle, free=free)


def summarize(state: FleetState) -> str:
    """Return the state in one sentence, for the heading of the picture."""
    states: dict[str, int] = {}
    for each in state.replicas:
        states[each.state] = states.get(each.state, 0) + 1
    held = sum(len(each.samples) for each in state.replicas)
    text = f"Fleet of {count_of(len(state.replicas), 'replica')}"
    text += f" ({', '.join(f'{count} {name}' for name, count in states.items())})" if states else ""
    text += f": {count_of(held, 'sample')} with them"
    text += f", {len(state.waiting)} at the front, {sum(state.num_ended.values())} ended"
    if state.in_flight:
        text += f"; {count_of(sum(each.pages for each in state.in_flight), 'page')} in flight"
    return text


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: `1 page`, `2,000 pages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def news_line(event: News, began: float) -> str:
    """Return a line of text that describes a routing, a move or a handover. `began` is the time of the fleet's first
    event."""
    name = f"{event.request_id}#{event.sample}" if event.sample else event.request_id
    begin = f"{format_seconds(max(0.0, event.time - began))}  {name}"
    match event:
        case Routed():
            return f"{begin} to {event.replica}: {event.reason}"
        case Moved():
            after = f" after {count_of(event.generated_tokens, 'token')}" if event.generated_tokens else ""
            return f"{begin} moved from {event.source} to {event.replica}{after}: {event.reason}"
        case HandedOver():
            size = f", {format_bytes(event.bytes)}" if event.bytes else ", shared memory: no bytes"
            what = f"{count_of(event.pages, 'page')}{size}, {format_seconds(event.seconds)}"
            return f"{begin} handed over from {event.source} to {event.replica}: {what}"
