"""Show a run as a chart of steps and requests over time, also while it is running."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.trace.events import Event
from workbench.trace.perfetto import read_trace
from workbench.trace.tables import events_of_tables
from workbench.trace.tracks import Tracks
from workbench.units import format_seconds
from workbench.widgets.time_axis.navigation import TimeNavigation
from workbench.widgets.timeline.data import TimelineBar, step_tip
from workbench.widgets.timeline.picture import draw_timeline

if TYPE_CHECKING:
    from workbench.runs.record import Record

RUN_TABLES = ("requests", "tokens", "steps")


class Timeline(TimeNavigation):
    """A Gantt chart of a run's steps and requests: queue, prefill chunks, decode, preemptions, and the reason of each
    decision. The bars are the same as in the Perfetto export.

    `source` is a runner, a record, a recorder, the result of `RunnerThread.submit`, or events. A runner's events are
    shown from now on, and the window follows the newest `span` seconds (default: all) while `follow` is on. `window` is
    the visible time in seconds since the first event; `chosen` is the number of the request with listed decisions
    (click on its name), or -1.

    Every event is kept until the view is closed: for a runner that serves for hours, memory grows with every token and
    step.
    """

    chosen = traitlets.Int(-1)

    def __init__(self, source: Any):
        super().__init__()
        self._pending_events: deque[Event] = deque()
        self._tracks, self._fresh = self._source(source)
        if self._leave is None:
            self.window = self.visible  # which ends `follow`
        self.watch("chosen")
        self.shown.on_pick(self._pick)
        self.show(ipywidgets.HBox(self.time_controls(), layout={"flex_flow": "row wrap"}), self.axis)

    @property
    def tracks(self) -> Tracks:
        """Return the tracks of all events received so far."""
        with self._lock:
            for event in self._fresh():
                self._tracks.record(event)
        return self._tracks

    @property
    def length(self) -> float:
        """Return the time from the first event to the last, in seconds."""
        origin, _, end = self._times()
        return end - origin

    def redraw(self) -> None:
        with self._lock:
            self.shown.content = self._draw(marks=False)
            self._read()

    def picture(self) -> str:
        return self._draw(marks=True)

    def _draw(self, marks: bool) -> str:
        with self._lock:
            return draw_timeline(self.tracks, self._view(), self.chosen, self.width, marks)

    def _times(self) -> tuple[float, float, float]:
        tracks = self.tracks
        return (tracks.begin, tracks.begin, tracks.end) if tracks.requests else (0.0, 0.0, 0.0)

    def _step_begins(self) -> Sequence[float]:
        return self.tracks.step_times

    def _describe(self, time: float) -> str:
        begins, steps = self._step_begins(), self._tracks.steps
        words = [f"at {format_seconds(time - self._origin)}"]
        if place := bisect_right(begins, time):
            words.append(step_tip(TimelineBar(0.0, 0.0, steps[place - 1 : place])).replace("\n", "; "))
        if self.selected:
            begin, end = self.selected
            words.append(f"{format_seconds(abs(end - begin))} are selected")
        return ": ".join(words[:2]) + "".join(f"; {each}" for each in words[2:])

    def _source(self, source: Any) -> tuple[Tracks, Callable[[], Iterator[Event]]]:
        from workbench.engine.runner import Runner
        from workbench.engine.runner_thread import RunnerThread
        from workbench.runs.record import Record

        if isinstance(source, Runner):
            self._leave = RunnerThread.attach(source).listen(self._on_event)
            return Tracks(), self._drain
        if isinstance(source, Record):
            return _tracks_of_record(source), lambda: iter(())
        events = getattr(source, "events", source)
        if not isinstance(events, list | tuple) or not all(isinstance(each, Event) for each in events):
            raise WorkbenchError(
                "Timeline: give a runner, a record, a recorder, what RunnerThread.submit gave, or a list of events, "
                f"not {type(source).__name__}"
            )
        seen = 0

        def fresh() -> Iterator[Event]:
            nonlocal seen
            first, seen = seen, len(events)
            return iter(events[first:seen])

        return Tracks(), fresh

    def _on_event(self, event: Event) -> None:
        self._pending_events.append(event)
        self.throttle.mark()

    def _drain(self) -> Iterator[Event]:
        while self._pending_events:
            yield self._pending_events.popleft()

    def _pick(self, key: str) -> None:
        if key.startswith("@"):
            number = int(key[1:])
            self.chosen = -1 if number == self.chosen else number


def _tracks_of_record(record: Record) -> Tracks:
    """Return a run's tracks from its trace, or from its tables if it has no trace (a comparison of variants)."""
    if (record.path / "trace.json").is_file():
        return read_trace(record.read_json("trace.json"))
    if not all((record.path / f"{name}.parquet").is_file() for name in RUN_TABLES):
        raise WorkbenchError(
            f"run {record.path}: holds neither trace.json nor the tables {', '.join(RUN_TABLES)}, so nothing has a "
            "time; see widgets.Compare, or record with workload: prompts, random or traffic"
        )
    tables = (record.read_table(f"{name}.parquet").to_pylist() for name in RUN_TABLES)
    tracks = Tracks()
    for event in events_of_tables(*tables):
        tracks.record(event)
    return tracks
