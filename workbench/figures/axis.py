"""Define what charts share: the Vega-Lite encoding of an axis, rows as data, and the filter for rows that an axis can
show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from workbench.figures.figure import View
from workbench.svg import Axis, Scale

Row = TypeVar("Row", bound=Any)
LARGE = 1e4  # numbers from this size on get a prefix: 12k


def channel(field: str, axis: Axis, values: Sequence[float] = (), zero: bool = False, **more: Any) -> View:
    """Return the Vega-Lite encoding of `field` on `axis`: round ticks, and a scale that extends a little beyond
    `values` and, with `zero`, begins at 0. If the axis has names instead of numbers, they keep their order."""
    if axis.names:
        return {
            "field": field,
            "type": "ordinal",
            "sort": list(axis.names),
            "title": axis.title or None,
            "axis": {"labelAngle": 0},
            **more,
        }
    low, high, ticks = ends(values, axis, zero)
    form = ".3~%" if axis.percent else ".3~s" if max(abs(low), abs(high)) >= LARGE else ".4~g"
    shown = {"format": form} | ({"values": ticks} if axis.log else {"tickCount": 5})
    scale = {"type": "log" if axis.log else "linear", "domain": [low, high], "nice": False, "zero": False}
    return {"field": field, "type": "quantitative", "title": axis.title or None, "axis": shown, "scale": scale, **more}


def ends(values: Sequence[float], axis: Axis, zero: bool = False) -> tuple[float, float, list[float]]:
    """Return the lower and upper end of an axis that shows `values`, and the round tick values between them."""
    scale = Scale.over([*values, *([0.0] if zero and not axis.log else [])], 0, 1, axis, zero)
    return scale.low, scale.high, scale.ticks()


def data(rows: Sequence[dict[str, Any]]) -> View:
    """Return rows as the `data` of a Vega-Lite view."""
    return {"values": list(rows)}


def showable(given: Sequence[Row], axis: Axis, field: str, *optional: str) -> list[Row]:
    """Return the rows (dataclasses) whose value of `field` the axis can show; their `optional` fields become None if
    the axis cannot show them.
    """
    found = []
    for each in given:
        if axis.shows(getattr(each, field)):
            beyond = [name for name in optional if (value := getattr(each, name)) is not None and not axis.shows(value)]
            found.append(replace(each, **dict.fromkeys(beyond)))
    return found
