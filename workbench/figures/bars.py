"""Draw horizontal bars of values, ratios with their intervals, spans of time, and grouped columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.figures.axis import channel, data, showable
from workbench.figures.figure import HEIGHT, WIDTH, Figure, View
from workbench.svg import SERIES_COLOURS, Axis
from workbench.units import format_number

ROW = 24  # height of a bar in pixels, with the gap around it
GOOD, BAD = SERIES_COLOURS[2], SERIES_COLOURS[5]
INK_ON_BARS = SERIES_COLOURS[1]
# Colour and shape of each result of a comparison.
VERDICTS = {
    "better": (GOOD, "triangle-down"),
    "worse": (BAD, "triangle-up"),
    "same": (SERIES_COLOURS[0], "square"),
    "not sure": ("#8a8a8a", "circle"),
}


@dataclass(frozen=True)
class Bar:
    """One bar, with its name and value; `mark` is the value predicted by a model, and `bad` gives the bar the colour of
    an error."""

    name: str
    value: float
    mark: float | None = None
    bad: bool = False
    words: str = ""  # text at the bar's end


@dataclass(frozen=True)
class IntervalBar:
    """One value with the ends of its interval (None without an interval), and optionally the verdict of a comparison (a
    key of `VERDICTS`)."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    verdict: str = ""
    tip: str = ""


@dataclass(frozen=True)
class SpanBar:
    """One part of a row, from `begin` to `end`, in the colour of its `group`."""

    name: str
    begin: float
    end: float
    group: str


@dataclass(frozen=True)
class Column:
    """A column of height `value` at the place `name`, next to the columns of other groups; `mark` is the height
    predicted by a model.
    """

    name: str
    value: float
    group: str = ""
    mark: float | None = None
    tip: str = ""


def bars(given: Sequence[Bar], x: Axis, title: str = "", *, width: float = WIDTH) -> Figure:
    """Draw a bar for each row, with a tick at its mark and text at its end. On a logarithmic axis bars begin at the
    axis's end.
    """
    given = showable(given, x, "value", "mark")
    values = [value for each in given for value in (each.value, each.mark) if value is not None]
    across = channel("value", x, values, zero=True)
    if any(each.words for each in given) and not x.log:
        across["scale"]["domain"][1] *= 1.15  # leave space for the text
    rows = [
        {
            "name": each.name,
            "value": each.value,
            "mark": each.mark,
            "bad": each.bad,
            "words": each.words,
            "tip": f"{each.name}: {x.title} {format_number(each.value)}",
        }
        for each in given
    ]
    colour: View = {"condition": {"test": "datum.bad", "value": BAD}, "value": GOOD}
    from_end = {"x2": {"datum": across["scale"]["domain"][0]}} if x.log else {}
    ticks = {
        "mark": {"type": "tick", "thickness": 2, "size": 18},
        "transform": [{"filter": "isValid(datum.mark)"}],
        "encoding": {"x": {**across, "field": "mark"}},
    }
    words = {"mark": {"type": "text", "align": "left", "dx": 4}, "encoding": {"x": across, "text": {"field": "words"}}}
    layers: list[View] = [
        {
            "mark": {"type": "bar", "height": {"band": 0.7}},
            "encoding": {"x": across, "color": colour, "description": {"field": "tip"}, **from_end},
        },
        *([ticks] if any(each.mark is not None for each in given) else []),
        *([words] if any(each.words for each in given) else []),
    ]
    return _rows([each.name for each in given], rows, layers, title, width)


def intervals(
    given: Sequence[IntervalBar],
    x: Axis,
    title: str = "",
    *,
    width: float = WIDTH,
    even: float = 1,
    legend: bool = True,
) -> Figure:
    """Draw each row's value with its interval, and a dashed line at the value that means equality; a legend explains
    the verdicts of comparisons, if there are any.
    """
    given = showable(given, x, "value", "low", "high")
    reach = [value for each in given for value in (each.value, each.low, each.high) if value is not None]
    across = channel("value", x, [*reach, even])
    rows = [
        {
            "name": each.name,
            "value": each.value,
            "low": each.low,
            "high": each.high,
            "verdict": each.verdict or "not sure",
            "words": f"{each.value:.{2 if abs(each.value - 1) > 0.02 else 4}f}",
            "tip": each.tip or f"{each.name}: {format_number(each.value)}",
        }
        for each in given
    ]
    legend = legend and any(each.verdict for each in given)
    look: View = {"field": "verdict", "type": "nominal", "legend": {"title": None} if legend else None}
    kinds = list(VERDICTS)
    colour = {**look, "scale": {"domain": kinds, "range": [VERDICTS[kind][0] for kind in kinds]}}
    shape = {**look, "scale": {"domain": kinds, "range": [VERDICTS[kind][1] for kind in kinds]}}
    place = {"x": across, "color": colour}
    layers: list[View] = [
        {
            "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.55},
            "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "encoding": {"x": {**across, "field": "low"}, "x2": {"field": "high"}, "color": colour},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
            "encoding": {**place, "shape": shape, "description": {"field": "tip"}},
        },
        {"mark": {"type": "text", "dy": -9, "fontSize": 10}, "encoding": {"x": across, "text": {"field": "words"}}},
    ]
    one = {"data": data([{"value": even}]), "mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"x": across}}
    found = _rows([each.name for each in given], rows, layers, title, width, row=ROW + 4)
    return Figure({**found.spec, "layer": [one, *found.spec["layer"]]})


def spans(given: Sequence[SpanBar], x: Axis, title: str = "", *, width: float = WIDTH) -> Figure:
    """Draw the parts of each row one after another, from 0 on."""
    given = showable(showable(given, x, "begin"), x, "end")
    groups = list(dict.fromkeys(each.group for each in given))
    across = channel("begin", x, [end for each in given for end in (each.begin, each.end)], zero=True)
    rows: list[dict[str, Any]] = [
        {
            "name": each.name,
            "begin": each.begin,
            "end": each.end,
            "group": each.group,
            "tip": f"{each.name}, {each.group}: {format_number(each.begin)} to {format_number(each.end)}",
        }
        for each in given
    ]
    colour = {"field": "group", "type": "nominal", "sort": groups, "title": None}
    layer = {
        "mark": {"type": "bar", "height": {"band": 0.7}},
        "encoding": {"x": across, "x2": {"field": "end"}, "color": colour, "description": {"field": "tip"}},
    }
    return _rows([each.name for each in given], rows, [layer], title, width, row=15)


def columns(
    given: Sequence[Column], x: str, y: Axis, title: str = "", *, width: float = WIDTH, height: float = HEIGHT
) -> Figure:
    """Draw a column for each place and group, columns of a place next to each other; a diamond is drawn at each
    mark."""
    given = showable(given, y, "value", "mark")
    groups, names = (list(dict.fromkeys(getattr(each, field) for each in given)) for field in ("group", "name"))
    rows = []
    for each in given:
        words = each.tip or f"{each.group}, {x} {each.name}: {format_number(each.value)}".lstrip(", ")
        rows.append({"name": each.name, "value": each.value, "group": each.group, "mark": each.mark, "tip": words})
    legend = {"title": None} if len(groups) > 1 else None
    offset = {"field": "group", "type": "nominal", "sort": groups}
    by_group = {**offset, "legend": legend}
    reach = [value for each in given for value in (each.value, each.mark) if value is not None]
    up = channel("value", y, reach, zero=True)
    place = {
        "x": {"field": "name", "type": "ordinal", "sort": names, "title": x, "axis": {"labelAngle": 0}},
        "xOffset": offset,
    }
    marks = {
        "mark": {"type": "point", "shape": "diamond", "size": 60, "strokeWidth": 2, "color": INK_ON_BARS},
        "transform": [{"filter": "isValid(datum.mark)"}],
        "encoding": {**place, "y": {**up, "field": "mark"}},
    }
    bar = {"mark": "bar", "encoding": {**place, "y": up, "color": by_group, "description": {"field": "tip"}}}
    layers = [bar, *([marks] if any(each.mark is not None for each in given) else [])]
    return Figure({"title": title, "width": width, "height": height, "data": data(rows), "layer": layers})


def _rows(
    names: Sequence[str],
    rows: Sequence[dict[str, Any]],
    layers: Sequence[View],
    title: str,
    width: float,
    row: int = ROW,
) -> Figure:
    """Return a figure of layers over rows with these names, in their order."""
    up = {"field": "name", "type": "nominal", "sort": list(dict.fromkeys(names)), "title": None}
    named = [{"data": data(rows), **each, "encoding": {"y": up, **each["encoding"]}} for each in layers]
    return Figure({"title": title, "width": width, "height": {"step": row}, "layer": named})
