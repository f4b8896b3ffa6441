"""Show a live or recorded fleet: replicas, samples, pages, pages between pools, and routing decisions."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from pathlib import Path
from typing import Any

import traitlets

from workbench.errors import WorkbenchError
from workbench.trace.events import Event, HandedOver
from workbench.widgets.fleet.data import HOLDING, FleetBook, FleetState, state_at
from workbench.widgets.fleet.picture import draw_fleet
from workbench.widgets.fleet.source import open_fleet, save_events
from workbench.widgets.recorded import Recorded
from workbench.widgets.throttle import Throttle
from workbench.widgets.view import PictureWidget

REDRAW_SECONDS = 0.2
CLOCK_SECONDS = 1.0  # between two redraws of a busy fleet without events
MAX_HISTORY = 200_000  # events
MAX_STEPS = 1_000  # of the control, spread evenly over the moments of a record


class FleetView(PictureWidget):
    """A view of a fleet's replicas with their samples and pages, the pages in flight between pools, and the routings
    with their reasons.

    `source` is a `workbench.Cluster` or `PrefillDecodePools`, which the view follows until it is closed; or events
    (also of a simulated fleet), a Recorder, or a file that `save` wrote, shown at a `step`: steps number the moments at
    which something changes, of a long record about `MAX_STEPS` of them. `chosen` is the name of a sample (click on it,
    or choose it with Enter): its path through the fleet is shown below. `state` is the present content, and `history`
    the events.
    """

    chosen = traitlets.Unicode("")
    step = traitlets.Int(0)

    _was_busy = _closed = False

    def __init__(self, source: Any):
        super().__init__()
        self._source = open_fleet(source)
        self._lock, self._book = threading.Lock(), FleetBook()
        self.history: deque[Event] = deque(self._source.events, MAX_HISTORY)
        self.throttle = Throttle(self.redraw, REDRAW_SECONDS)
        self.state = FleetState()
        self.shown.on_pick(self._pick)
        begins = {each.time - each.seconds for each in self.history if isinstance(each, HandedOver)}
        self._times = sorted(begins | {each.time for each in self.history}) or [0.0]
        stride = -(-len(self._times) // MAX_STEPS)
        self._step_times = [*self._times[:-1:stride], self._times[-1]]
        self._time = self._times[-1]
        if self._source.listen is None:
            self.steps = Recorded(self, last=len(self._step_times) - 1)
            self.step = self.steps.last
            self.observe(lambda _: setattr(self, "_time", self._step_times[self.step]), "step")
        self.watch("chosen", "step")
        self.show(*([self.steps] if self.steps else []))
        if self._source.listen is not None:
            self._leave = self._source.listen(self._hear)

    def show_at(self, seconds: float) -> None:
        """Show the recorded events at a time, `seconds` after the first event, which may lie between two steps of the
        control."""
        time = self._times[max(0, bisect_right(self._times, self._times[0] + seconds) - 1)]
        self.step = bisect_right(self._step_times, time) - 1
        self._time = time
        self.throttle.mark()

    def redraw(self) -> None:
        if self._closed:
            return
        self.state = self._read()
        super().redraw()
        if self._source.listen is None:
            return
        is_busy = any(each.samples for each in self.state.replicas) or bool(self.state.waiting or self.state.in_flight)
        if self._was_busy and not is_busy:
            self.keep()
        self._was_busy = is_busy
        if is_busy or any(each.state not in HOLDING for each in self.state.replicas):
            self.throttle.mark_later(CLOCK_SECONDS)  # a replica starts without an event

    def keep(self) -> None:
        if not self._closed:
            self.state = self._read()
        super().keep()

    def picture(self) -> str:
        """Draw `state`."""
        return draw_fleet(self.state, self.chosen, self._source.title)

    def save(self, path: str | Path) -> Path:
        """Write the events to a file, which `FleetView(path)` shows again at any moment; return its path."""
        with self._lock:
            events = tuple(self.history)
        return save_events(events, path)

    def close(self) -> None:
        self._closed = True
        super().close()

    def _hear(self, event: Event) -> None:
        """Record an event; called in a thread of the fleet."""
        with self._lock:
            self.history.append(event)
            self._book.take(event)
        self.throttle.mark()

    def _read(self) -> FleetState:
        if self._source.listen is None:
            return state_at(self.history, self._time)
        try:
            members, in_flight = self._source.read()
        except WorkbenchError:  # the fleet was closed
            members, in_flight = None, ()
        with self._lock:
            return self._book.state(members, in_flight)

    def _pick(self, key: str) -> None:
        if key.startswith("@"):
            self.chosen = "" if key[1:] == self.chosen else key[1:]
