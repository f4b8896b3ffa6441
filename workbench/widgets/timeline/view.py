"""Show a run as a chart of steps and requests over time, also while it is running."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.trace.events import Event
from workbench.trace.perfetto import read_trace
from workbench.trace.tables import events_of_tables
from workbench.trace.tracks import Tracks
from workbench.widgets.timeline.picture import draw_timeline
from workbench.widgets.view import PictureWidget

if TYPE_CHECKING:
    from workbench.runs.record import Record

BUTTONS = (
    ("◀", "earlier"), ("▶", "later"), ("+", "zoom in"), ("−", "zoom out"), ("all", "the whole run"),
)  # fmt: skip

RUN_TABLES = ("requests", "tokens", "steps")


class Timeline(PictureWidget):
    """A Gantt of steps and requests: queue, prefill chunks, decode, preemptions, and the reason of each decision. The
    bars are those of the Perfetto export.

    Given a runner, the view shows everything that it does from now on, and follows it as long as `follow` is on; given
    a record, a recorder, the result of `RunnerThread.submit`, or events, it shows these. `window` is the visible part,
    in milliseconds from the first event; `chosen` the number of the request whose decisions are listed (click on its
    name), or -1.

    Every event is kept until the view is closed: with a runner that serves for hours, memory grows with every token and
    step.
    """

    window = traitlets.Tuple(traitlets.Float(), traitlets.Float(), default_value=(0.0, 1.0))
    follow = traitlets.Bool(True)
    chosen = traitlets.Int(-1)

    def __init__(self, source: Any):
        super().__init__()
        self._drain_lock, self._reaching = RLock(), 0
        self._known = 0.05  # how long the run was when it was drawn last, in milliseconds
        self._pending_events: deque[Event] = deque()
        self._tracks, self._fresh = self._source(source)
        self.follow = self._leave is not None
        # In percent of the run: a slider whose ends move while it is shown sends values not chosen by the user.
        self._slider = ipywidgets.FloatRangeSlider(
            value=(0.0, 100.0), description="from, to", min=0.0, max=100.0, step=0.1, readout=False
        )
        self._slider.layout.width = "36em"
        self._slider.observe(self._on_slider, "value")
        live = ipywidgets.Checkbox(description="follow", indent=False, disabled=self._leave is None)
        live.layout.width = "6em"
        traitlets.link((self, "follow"), (live, "value"))
        self.watch("follow", "chosen")
        self.observe(self._on_window, "window")
        self.shown.observe(lambda change: self._pick(change["new"]), "picked")
        self._extend_window(whole=True)
        self.show(ipywidgets.HBox([self._slider, *map(self._button, BUTTONS), live]))

    @property
    def tracks(self) -> Tracks:
        """Return the tracks of all events received so far."""
        with self._drain_lock:
            for event in self._fresh():
                self._tracks.record(event)
        return self._tracks

    @property
    def length(self) -> float:
        """Milliseconds from the first moment to the last."""
        return max(0.0, self._tracks.end - self._tracks.begin) * 1e3 if self._tracks.requests else 0.0

    def redraw(self) -> None:
        with self._drain_lock:
            self._extend_window(whole=False)
            super().redraw()

    def picture(self) -> str:
        with self._drain_lock:
            low, high = self.window
            return draw_timeline(self.tracks, low, high, self.chosen, self.width)

    def zoom(self, factor: float = 1.0, by: float = 0.0) -> None:
        """Scale the window by `factor` around its middle and move it by `by` windows."""
        low, high = self.window
        wide = min(max((high - low) * factor, 0.05), max(self.length, 0.05))
        middle = (low + high) / 2 + by * (high - low)
        low = min(max(0.0, middle - wide / 2), max(0.0, self.length - wide))
        self.window = (low, low + wide)

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

    def _extend_window(self, whole: bool) -> None:
        """Extend the window to the run's end where `follow` is on, and move the slider's handles."""
        if not self.tracks.requests:
            return
        length, (low, high) = max(self.length, 0.05), self.window
        self._reaching = get_ident()
        try:
            if whole or (self.follow and high - low >= self._known - 1e-9):
                self.window = (0.0, length)
            elif self.follow:
                self.window = (max(0.0, length - (high - low)), length)
            self._known = length
            low, high = self.window
            self._slider.value = (min(100.0, 100 * low / length), min(100.0, 100 * high / length))
        finally:
            self._reaching = 0

    def _on_slider(self, change: dict[str, Any]) -> None:
        if self._reaching != get_ident():
            low, high = (share / 100 * self._known for share in change["new"])
            self.window = (low, max(high, low + 0.05))

    def _on_window(self, change: dict[str, Any]) -> None:
        if self._reaching == get_ident():
            return
        if change["new"][1] < self._known * 0.999:
            self.follow = False  # who looks back is not carried off
        self.throttle.mark()

    def _button(self, about: tuple[str, str]) -> ipywidgets.Button:
        sign, what = about
        button = ipywidgets.Button(description=sign, tooltip=what, layout=ipywidgets.Layout(width="3em", flex="none"))
        act: dict[str, Callable[[], None]] = {
            "◀": lambda: self.zoom(by=-0.5), "▶": lambda: self.zoom(by=0.5), "+": lambda: self.zoom(0.5),
            "−": lambda: self.zoom(2.0), "all": lambda: self.set_trait("window", (0.0, max(self.length, 0.05))),
        }  # fmt: skip
        button.on_click(lambda _: act[sign]())
        return button

    def _pick(self, key: str) -> None:
        if key.startswith("@"):
            number = int(key[1:])
            self.chosen = -1 if number == self.chosen else number


def _tracks_of_record(record: Record) -> Tracks:
    """Return a run's tracks from its trace, or where a comparison of variants kept none from its tables."""
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
