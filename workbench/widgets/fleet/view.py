"""Show a fleet at work or a recorded one: replicas, samples, pages, pages between pools, and where requests went."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.trace.events import Event
from workbench.widgets.fleet.data import HOLDING, FleetBook, FleetState, state_at
from workbench.widgets.fleet.picture import draw_fleet
from workbench.widgets.fleet.source import open_fleet, save_events
from workbench.widgets.throttle import Throttle
from workbench.widgets.view import PictureWidget

REDRAW_SECONDS = 0.2
CLOCK_SECONDS = 1.0  # between two looks at a fleet in which something goes on
MAX_HISTORY = 200_000  # events
SLIDER_STEPS = 1000


class FleetView(PictureWidget):
    """Replicas of a fleet with their samples and pages, pages in flight between pools, and routings with their reasons.

    Given a `workbench.Cluster` or `PrefillDecodePools`, the view follows it until it is closed. Given events (those of
    a simulated fleet too), a Recorder, or a file that `save` wrote, it shows them at `moment`, in seconds after the
    first one, with a slider. `chosen` is the name of the sample whose way is shown below: click on it, or choose it
    with Enter. `state` is what is shown, and `history` the events.
    """

    chosen = traitlets.Unicode("")
    moment = traitlets.Float(0.0)

    _was_busy = _closed = False

    def __init__(self, source: Any):
        super().__init__()
        self._source = open_fleet(source)
        self._lock, self._book = threading.Lock(), FleetBook()
        self.history: deque[Event] = deque(self._source.events, MAX_HISTORY)
        self.throttle = Throttle(self.redraw, REDRAW_SECONDS)
        self.state = FleetState()
        self.shown.observe(lambda change: self._pick(change["new"]), "picked")
        controls = []
        if self._source.listen is None:
            times = [each.time for each in self.history] or [0.0]
            self._began, self.moment = min(times), max(times) - min(times)
            length = max(self.moment, 1e-9)
            slider = ipywidgets.FloatSlider(
                description="moment, s", min=0.0, max=length, step=length / SLIDER_STEPS, readout_format=".3f"
            )
            slider.layout.width = "min(40em, 95%)"
            traitlets.link((self, "moment"), (slider, "value"))
            controls.append(slider)
        self.watch("chosen", "moment")
        self.show(*controls)
        if self._source.listen is not None:
            self._leave = self._source.listen(self._hear)

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
        """Draw the state that is shown."""
        return draw_fleet(self.state, self.chosen, self._source.title)

    def save(self, path: str | Path) -> Path:
        """Write the events to a file that `FleetView(path)` shows again, at any moment."""
        with self._lock:
            events = tuple(self.history)
        return save_events(events, path)

    def close(self) -> None:
        self._closed = True
        super().close()

    def _hear(self, event: Event) -> None:
        """Take an event, in a thread of the fleet's."""
        with self._lock:
            self.history.append(event)
            self._book.take(event)
        self.throttle.mark()

    def _read(self) -> FleetState:
        if self._source.listen is None:
            return state_at(self.history, self._began + self.moment)
        try:
            members, in_flight = self._source.read()
        except WorkbenchError:  # the fleet was closed
            members, in_flight = None, ()
        with self._lock:
            return self._book.state(members, in_flight)

    def _pick(self, key: str) -> None:
        if key.startswith("@"):
            self.chosen = "" if key[1:] == self.chosen else key[1:]
