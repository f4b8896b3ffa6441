"""Move window, cursor and selection of an axis of time: by pointer, wheel, keys and code."""

from __future__ import annotations

from threading import RLock
from typing import Any

import traitlets

from workbench.errors import WorkbenchError
from workbench.widgets.live_bench.log import BenchLog
from workbench.widgets.live_bench.picture import TimeView
from workbench.widgets.view import PictureWidget

SPAN_SECONDS = 12.0  # in sight while the newest is followed
MIN_SPAN_SECONDS = 0.005


class TimeNavigation(PictureWidget):
    """A picture of a log over time, and the part of it in sight.

    `cursor` is a time, None for the newest; `selected` are two times. `follow` keeps the newest `span` seconds in
    sight, else `window` is. Times are seconds since the first event.
    """

    follow = traitlets.Bool(True)
    span = traitlets.Float(SPAN_SECONDS)
    window = traitlets.Tuple(traitlets.Float(), traitlets.Float(), default_value=(0.0, SPAN_SECONDS))
    cursor = traitlets.Float(None, allow_none=True)
    selected = traitlets.Tuple(default_value=())

    def __init__(self) -> None:
        super().__init__()
        self._lock = RLock()  # of the log and the picture

    @property
    def log(self) -> BenchLog:
        """Return the log of everything so far."""
        raise NotImplementedError

    @traitlets.validate("span")
    def _validate_span(self, proposal: Any) -> float:
        if not proposal["value"] > 0:
            raise WorkbenchError(f"span must be more than 0 seconds, not {proposal['value']}")
        return proposal["value"]

    def zoom(self, factor: float = 1.0, by: float = 0.0, at: float | None = None) -> None:
        """Scale the window by `factor` around the time `at`, the middle by default, and move it by `by` windows."""
        log, (low, high) = self.log, self._window()
        if log.origin is None:
            return
        last, first = log.end - log.origin, log.begin - log.origin
        wide = min(max((high - low) * factor, MIN_SPAN_SECONDS), max(last - first, SPAN_SECONDS))
        share = 0.5 if at is None else min(max((at - low) / (high - low), 0.0), 1.0)
        low = low + share * (high - low) - share * wide + by * wide
        self._look(min(max(low, first), max(last - wide, first)), wide)

    def show_all(self) -> None:
        """Show everything that is kept, and follow the newest; the cursor does, too."""
        self.span = self.log.kept_seconds
        self.show_newest()

    def show_newest(self) -> None:
        """Follow the newest, with the cursor, too."""
        self.cursor, self.follow = None, True

    @property
    def _origin(self) -> float:
        return self.log.origin or 0.0

    def _window(self) -> tuple[float, float]:
        """Return the times in sight, in seconds since the first event."""
        if not self.follow:
            return self.window
        log = self.log
        last, first = (0.0, 0.0) if log.origin is None else (log.end - log.origin, log.begin - log.origin)
        if self.span >= log.kept_seconds:
            return first, max(last, first + 1.0)
        return max(first, last - self.span), max(last, first + self.span)

    def _look(self, low: float, wide: float) -> None:
        self.follow, self.window = False, (low, low + wide)

    def _view(self) -> TimeView:
        """Return what is in sight, on the runner's clock."""
        low, high = (self._origin + each for each in self._window())
        cursor = None if self.cursor is None else self._origin + self.cursor
        chosen = tuple(self._origin + each for each in self.selected)
        return TimeView(low, high, cursor, (chosen[0], chosen[1]) if chosen else None)

    def _on_axis(self, message: dict[str, Any]) -> None:
        """Take what was done with pointer, wheel or keys; its times are those of the runner's clock."""
        origin = self._origin
        match message:
            case {"cursor": at}:
                self.cursor = None if at is None else at - origin
            case {"move": by}:
                self.cursor = self._moved(self._cursor_time(), by)
            case {"extend": by}:
                begin, end = self.selected or (self._cursor_time(),) * 2
                self.selected = (begin, self._moved(end, by))
            case {"select": []}:
                self.selected = ()
            case {"select": [begin, end]}:
                self.selected = (begin - origin, end - origin)
            case {"window": [low, high]}:
                self.zoom(by=(low - origin - self._window()[0]) / (high - low))
            case {"zoom": factor, "at": at}:
                self.zoom(factor, at=None if at is None else at - origin)
            case {"pan": by}:
                self.zoom(by=by)
            case {"all": _}:
                self.show_all()

    def _cursor_time(self) -> float:
        return self.log.end - self._origin if self.cursor is None else self.cursor

    def _moved(self, time: float, by: int) -> float:
        """Return the time `by` steps of the engine later, and at least as many pixels."""
        low, high = self._window()
        pixels = by * (high - low) / self.width
        with self._lock:
            return self.log.next_step(self._origin + time + pixels, 1 if by > 0 else -1) - self._origin
