"""Move the window, the cursor and the selection of a time axis by pointer, wheel, keys, buttons or code."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import inf
from threading import RLock
from typing import Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.widgets.time_axis.axis import TimeAxis
from workbench.widgets.time_axis.picture import TimeView
from workbench.widgets.view import PictureWidget, button

MIN_SPAN_SECONDS = 5e-5


class TimeNavigation(PictureWidget):
    """A base of pictures over time, with a visible window, a cursor and a selection.

    `cursor` is a time, or None for the newest; `selected` holds two times, or none. With `follow` the newest `span`
    seconds are visible, else `window`; setting `window` ends `follow`. Times are seconds since the first event.
    """

    follow = traitlets.Bool(True)
    span = traitlets.Float(inf)
    window = traitlets.Tuple(traitlets.Float(), traitlets.Float(), default_value=(0.0, 1.0))
    cursor = traitlets.Float(None, allow_none=True)
    selected = traitlets.Tuple(default_value=())

    kept_seconds = inf  # older events are dropped
    min_window = MIN_SPAN_SECONDS  # of a window that shows all events

    def __init__(self) -> None:
        super().__init__()
        self._lock = RLock()  # guards the events and the picture
        self.axis = TimeAxis(self._on_axis)

    def _times(self) -> tuple[float, float, float]:
        """Return the times of the first event, and of the oldest and newest kept one, on the events' clock."""
        raise NotImplementedError

    def _step_begins(self) -> Sequence[float]:
        """Return the begin of each kept step on the events' clock, ascending."""
        raise NotImplementedError

    def _describe(self, time: float) -> str:
        """Describe a time on the events' clock in one line."""
        raise NotImplementedError

    @traitlets.validate("span")
    def _validate_span(self, proposal: Any) -> float:
        if not proposal["value"] > 0:
            raise WorkbenchError(f"span must be more than 0 seconds, not {proposal['value']}")
        return proposal["value"]

    @traitlets.observe("window")
    def _end_follow(self, _: object) -> None:
        self.follow = False  # a user who looks back keeps the window

    def zoom(self, factor: float = 1.0, by: float = 0.0, at: float | None = None) -> None:
        """Scale the window by `factor` around the time `at` (default: its middle), and move it by `by` times its
        width."""
        (origin, begin, end), (low, high) = self._times(), self.visible
        if end <= origin:
            return
        first, last = begin - origin, end - origin
        wide = min(max((high - low) * factor, MIN_SPAN_SECONDS), max(last - first, self.min_window))
        share = 0.5 if at is None else min(max((at - low) / (high - low), 0.0), 1.0)
        low = low + share * (high - low) - share * wide + by * wide
        low = min(max(low, first), max(last - wide, first))
        self.follow, self.window = False, (low, low + wide)

    def show_all(self) -> None:
        """Show all kept events; window and cursor follow the newest."""
        self.span = self.kept_seconds
        self.show_newest()

    def show_newest(self) -> None:
        """Let window and cursor follow the newest event."""
        self.cursor, self.follow = None, True

    @property
    def visible(self) -> tuple[float, float]:
        """Return begin and end of the visible window, in seconds since the first event."""
        if not self.follow:
            return self.window
        origin, begin, end = self._times()
        first, last = begin - origin, end - origin
        if self.span >= self.kept_seconds:
            return first, max(last, first + min(1.0, self.min_window))
        return max(first, last - self.span), max(last, first + self.span)

    def time_controls(self) -> list[ipywidgets.Widget]:
        """Return the axis' buttons, and redraw on its changes from now on."""
        self.watch("follow", "window", "span")
        self.observe(lambda _: self._read(), ["cursor", "selected"])
        acts = (
            ("◀", "earlier", lambda: self.zoom(by=-0.5)), ("▶", "later", lambda: self.zoom(by=0.5)),
            ("+", "zoom in", lambda: self.zoom(0.5)), ("−", "zoom out", lambda: self.zoom(2.0)),
            ("all", "show all kept events", self.show_all),
            ("newest", "let window and cursor follow the newest event", self.show_newest),
            ("clear", "remove the selection", lambda: self.set_trait("selected", ())),
        )  # fmt: skip
        slim = {"width": "auto", "min_width": "3em"}
        follow = ipywidgets.Checkbox(description="follow", indent=False, layout={"width": "5.5em"})
        follow.tooltip = "keep the newest events visible"
        return [
            self.linked("follow", follow),
            *(button(act, sign, tooltip=tip, layout=slim) for sign, tip, act in acts),
        ]

    @property
    def _origin(self) -> float:
        return self._times()[0]

    def _view(self) -> TimeView:
        """Return window, cursor and selection on the events' clock."""
        origin = self._origin
        low, high = self.visible
        cursor = None if self.cursor is None else origin + self.cursor
        return TimeView(origin + low, origin + high, cursor, tuple(origin + each for each in self.selected))

    def _read(self) -> None:
        """Describe the time at the cursor."""
        with self._lock:
            view, (_, _, end) = self._view(), self._times()
            self.axis.reading = self._describe(end if view.cursor is None else view.cursor)
            self.axis.cursor, self.axis.selection = view.cursor, list(view.selection)

    def _on_axis(self, message: dict[str, Any]) -> None:
        """Handle an action of pointer, wheel or keys; its times are on the events' clock."""
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
                self.zoom(by=(low - origin - self.visible[0]) / (high - low))
            case {"zoom": factor, "at": at}:
                self.zoom(factor, at=None if at is None else at - origin)
            case {"pan": by}:
                self.zoom(by=by)
            case {"all": _}:
                self.show_all()

    def _cursor_time(self) -> float:
        origin, _, end = self._times()
        return end - origin if self.cursor is None else self.cursor

    def _moved(self, time: float, by: int) -> float:
        """Return the time moved by one engine step in the direction of `by`, and at least by `by` pixels."""
        low, high = self.visible
        pixels = by * (high - low) / self.width
        with self._lock:
            origin, *kept = self._times()
            return next_begin(self._step_begins(), origin + time + pixels, by, *kept) - origin


def next_begin(begins: Sequence[float], time: float, by: int, first: float, last: float) -> float:
    """Return the first of the ascending times `begins` after `time`, or `last` if there is none; with `by` < 0 the last
    one before `time`, or `first`."""
    if by > 0:
        place = bisect_right(begins, time)
        return begins[place] if place < len(begins) else last
    place = bisect_left(begins, time) - 1
    return begins[place] if place >= 0 else first
