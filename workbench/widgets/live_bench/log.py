"""Record a runner's requests, queue, batch, pages and latencies as numbers over time.

arrived = refused + waiting + running + ended, after every event. Events older than `kept_seconds` are dropped.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.request import FinishReason
from workbench.trace.events import (
    Decoded,
    Event,
    Finished,
    Preempted,
    Scheduled,
    SettingsChanged,
    Stepped,
    Submitted,
)
from workbench.trace.slices import Track
from workbench.trace.tracks import Tracks

KEPT_SECONDS = 120.0
MERGE_SECONDS = 1.0  # consecutive changes of one setting within this time are drawn as one mark
CANCELLED = (FinishReason.CANCELLED.value, FinishReason.ERROR.value)
Floats = NDArray[np.float64]


class TimedValues:
    """A series of values with their times, in seconds on the runner's clock."""

    def __init__(self) -> None:
        self._times, self._values = array("d"), array("d")

    def __len__(self) -> int:
        return len(self._times)

    def add(self, time: float, value: float = 1.0) -> None:
        """Add a value; a time that is earlier than the last one, by rounding, is set to the last one."""
        self._times.append(max(time, self._times[-1]) if self._times else time)
        self._values.append(value)

    def between(self, begin: float, end: float) -> tuple[Floats, Floats]:
        """Return times and values with begin <= time < end."""
        first, last = bisect_left(self._times, begin), bisect_left(self._times, end)
        return np.array(self._times[first:last]), np.array(self._values[first:last])

    def count(self, begin: float, end: float) -> int:
        return max(0, bisect_left(self._times, end) - bisect_left(self._times, begin))

    def drop_before(self, time: float) -> None:
        old = bisect_left(self._times, time)
        del self._times[:old], self._values[:old]


class StepPoint(NamedTuple):
    """One step of the runner, from `begin` to `end` in seconds: it computes `running` requests and leaves `waiting`
    ones in the queue."""

    end: float
    begin: float
    step: int
    waiting: int
    running: int
    prefill_tokens: int
    decode_tokens: int
    pages_used: int
    pages_idle: int


def merge_changes(changes: Iterable[SettingsChanged]) -> list[SettingsChanged]:
    """Merge consecutive changes of one setting within `MERGE_SECONDS`; drop merged changes that undo each other."""
    merged: list[SettingsChanged] = []
    for each in changes:
        near = (place for place, other in enumerate(merged) if other.name == each.name)
        last = max(near, default=None)
        if last is not None and each.time - merged[last].time <= MERGE_SECONDS:
            merged[last] = replace(merged[last], new=each.new)
        else:
            merged.append(each)
    return [each for each in merged if each.old != each.new]


@dataclass
class _Open:
    """A request that has not ended."""

    row: int
    arrival: float
    is_running: bool = False
    last_token: float | None = None


class BenchLog:
    """The series of values and the tracks of requests that a load's events yield: `record` adds the next event, and
    reads are allowed between calls."""

    def __init__(self, kept_seconds: float = KEPT_SECONDS):
        self.kept_seconds = kept_seconds
        self.tracks = Tracks()
        self.steps: list[StepPoint] = []
        self.arrived, self.refused, self.started = TimedValues(), TimedValues(), TimedValues()
        self.ended, self.cancelled, self.preempted = TimedValues(), TimedValues(), TimedValues()
        self.ttft, self.itl = TimedValues(), TimedValues()  # seconds, at the time of the token that ends the interval
        self.tokens = TimedValues()  # output tokens
        self.num_arrived = self.num_refused = self.num_ended = 0  # since the beginning
        self.begin = self.end = 0.0  # times of the oldest and newest kept event, once there is one
        self.origin: float | None = None  # time of the first event
        self._open: dict[tuple[str, int], _Open] = {}
        self._num_running = 0
        self._rows: dict[int, int] = {}  # by id of a track: its row in the picture
        self._free_rows: list[int] = []
        self.num_rows = 0  # rows that requests have had at once, since the beginning

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return len(self._open) - self._num_running

    @property
    def has_dropped(self) -> bool:
        """Return whether the log has dropped events from before `begin`."""
        return self.origin is not None and self.begin > self.origin

    def row_of(self, track: Track) -> int:
        """Return the number of the row in which a request is drawn: the lowest row free at its arrival, reserved until
        it ends."""
        return self._rows.get(id(track), 0)

    def advance(self, now: float) -> None:
        """Move the log's end to `now`, and drop events older than `kept_seconds`."""
        if self.origin is None:
            self.origin = self.begin = self.end = now
        self.end = max(self.end, now)
        if self.end - self.begin > 1.25 * self.kept_seconds:  # not at every event
            self._drop_before(self.end - self.kept_seconds)

    def record(self, event: Event) -> None:
        self.advance(event.time)
        key = event.request_id, event.sample
        if event.request_id and key not in self._open and not isinstance(event, Submitted):
            if isinstance(event, Finished) and event.reason == FinishReason.REFUSED:  # before it reached the runner
                self._arrive(event.time)
                self._refuse(event.time)
            return  # any other such request was submitted before the log began
        self.tracks.record(event)
        match event:
            case Submitted():
                self._arrive(event.time)
                row = heapq.heappop(self._free_rows) if self._free_rows else self.num_rows
                self.num_rows = max(self.num_rows, row + 1)
                self._open[key] = _Open(row, event.arrival)
                self._rows[id(self.tracks.requests[-1])] = row
            case Scheduled(action="admitted"):
                self._set_running(self._open[key], True)
                if self._open[key].last_token is None:
                    self.started.add(event.time)
            case Preempted():
                self._set_running(self._open[key], False)
                self.preempted.add(event.time)
            case Decoded():
                self._token(self._open[key], event.time)
            case Finished():
                self._end(key, event)
            case Stepped():
                self._step(event)

    @property
    def changes(self) -> list[SettingsChanged]:
        """Return the changes of settings; consecutive changes of one setting are merged."""
        return merge_changes(self.tracks.changes)

    def step_at(self, time: float) -> StepPoint | None:
        """Return the step that was running at `time`, or the last one before it; None before the first step."""
        place = bisect_left(self.steps, time, key=lambda step: step.begin)
        if place < len(self.steps) and self.steps[place].begin <= time:
            return self.steps[place]
        return self.steps[place - 1] if place else None

    def steps_between(self, begin: float, end: float) -> list[StepPoint]:
        """Return the steps that end at a time with begin <= time < end."""
        first, last = (bisect_left(self.steps, time, key=lambda step: step.end) for time in (begin, end))
        return self.steps[first:last]

    def _arrive(self, time: float) -> None:
        self.arrived.add(time)
        self.num_arrived += 1

    def _refuse(self, time: float) -> None:
        self.refused.add(time)
        self.num_refused += 1

    def _set_running(self, each: _Open, running: bool) -> None:
        self._num_running += int(running) - int(each.is_running)
        each.is_running = running

    def _token(self, each: _Open, time: float) -> None:
        self.tokens.add(time)
        if each.last_token is None:
            self.ttft.add(time, time - each.arrival)
        else:
            self.itl.add(time, time - each.last_token)
        each.last_token = time

    def _end(self, key: tuple[str, int], event: Finished) -> None:
        gone = self._open.pop(key)
        self._num_running -= gone.is_running
        heapq.heappush(self._free_rows, gone.row)
        if event.reason == FinishReason.REFUSED:
            self._refuse(event.time)
            return
        self.num_ended += 1
        (self.cancelled if event.reason in CANCELLED else self.ended).add(event.time)

    def _step(self, event: Stepped) -> None:
        tokens = event.prefill_tokens, event.decode_tokens
        pages = event.pages_used, event.pages_idle
        begin = event.time - event.wall_seconds
        # The engine emits a step's admissions before this event: admitted requests have already left the queue.
        waiting, running = self.num_waiting, event.requests
        self.steps.append(StepPoint(event.time, begin, event.step, waiting, running, *tokens, *pages))

    def _drop_before(self, time: float) -> None:
        series = (self.arrived, self.refused, self.started, self.ended, self.cancelled, self.preempted)
        for each in (*series, self.ttft, self.itl, self.tokens):
            each.drop_before(time)
        del self.steps[: bisect_left(self.steps, time, key=lambda step: step.end)]
        self.tracks.drop_before(time)
        kept = {id(track) for track in self.tracks.requests}
        self._rows = {track: row for track, row in self._rows.items() if track in kept}
        self.begin = time
