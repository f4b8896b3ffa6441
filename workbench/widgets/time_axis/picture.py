"""Draw a time axis with round times, and the cursor and selection for a saved picture."""

from __future__ import annotations

from dataclasses import dataclass

from workbench import svg
from workbench.svg import Scale

TICK_PIXELS = 90  # least mean distance of two labels


@dataclass(frozen=True)
class TimeView:
    """The visible part of the axis in seconds on the events' clock, the cursor's time, and the selection (two times or
    none)."""

    low: float
    high: float
    cursor: float | None = None
    selection: tuple[float, ...] = ()

    def across(self, begin: float, end: float) -> Scale:
        """Return the scale from times to pixels between `begin` and `end`."""
        return Scale(self.low, max(self.high, self.low + 1e-6), begin, end)


def draw_ticks(across: Scale, origin: float, top: float, bottom: float, right: float) -> str:
    """Draw round times since `origin`, in milliseconds within a second of it and else in seconds: labels above `top`
    that end left of `right`, and lines down to `bottom`."""
    unit, size = ("s", 1.0) if max(across.high - origin, origin - across.low) >= 1 else ("ms", 1e-3)
    axis = Scale((across.low - origin) / size, (across.high - origin) / size, across.begin, across.end)
    parts = []
    for value in axis.ticks(max(3, int((across.end - across.begin) / TICK_PIXELS))):
        x, label = axis(value), f"{value:.12g} {unit}"  # all digits of a tick
        middle = min(x, right - 4 - len(label) * svg.CHARACTER_WIDTH / 2)
        parts.append(svg.line(x, top, x, bottom, class_="grid"))
        parts.append(svg.text(middle, top - 4, label, class_="s faint", text_anchor="middle"))
    return svg.group(*parts)


def place_axis(across: Scale, top: float, bottom: float, begin: float) -> str:
    """Return an element that tells the browser where the axis is, and the time `begin` of the first kept event."""
    return svg.group(
        data_axis=f"{across.low!r} {across.high!r} {across.begin!r} {across.end!r} {top!r} {bottom!r} {begin!r}"
    )


def draw_marks(view: TimeView, across: Scale, top: float, bottom: float) -> str:
    """Draw selection and cursor; in a live view the browser draws them."""
    parts = []
    if view.selection:
        low, high = (across(min(max(each, across.low), across.high)) for each in sorted(view.selection))
        fill = {"class_": "sel", "fill": "#0072b2", "fill_opacity": 0.14, "pointer_events": "none"}
        parts.append(svg.rect(low, top, high - low, bottom - top, **fill))
    if view.cursor is not None and across.low <= view.cursor <= across.high:
        x = across(view.cursor)
        parts.append(svg.line(x, top, x, bottom, stroke="#d55e00", stroke_width=1.6))
    return svg.group(*parts)
