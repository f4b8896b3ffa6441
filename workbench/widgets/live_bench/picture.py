"""Draw a load over one axis of time: requests, queue and batch, pages, percentiles of latencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from workbench import svg
from workbench.svg import Axis, Scale
from workbench.widgets.live_bench.log import BenchLog, StepPoint, TimedValues
from workbench.widgets.live_bench.statistics import (
    PERCENTILES,
    WINDOW_SECONDS,
    WindowStatistics,
    overload,
    sliding_percentiles,
    window_statistics,
)
from workbench.widgets.pages.data import PageSnapshot
from workbench.widgets.pages.picture import PATTERNS, STRIP_HEIGHT, draw_strip
from workbench.widgets.pages.picture import STYLE as PAGE_STYLE
from workbench.widgets.timeline.picture import REQUEST_MARKS, draw_legend, draw_request
from workbench.widgets.timeline.picture import STYLE as TIMELINE_STYLE

LEFT, RIGHT = 104.0, 94.0  # pixels beside the axis of time: names of the panels, and the newest values
ROWS_HEIGHT, MIN_ROW, MAX_ROW = 264.0, 6.0, 16.0  # of all requests, and of one
PANEL_HEIGHT, GAP = 62.0, 16.0
PIXELS_A_POINT = 2.0  # of a line
MOMENTS = 160  # at which percentiles are taken
LABEL_HEIGHT = 12.0
SETTING_NAMES = {
    "rate": ("load", "{}/s"), "long_share": ("long", "{:.0%}"), "shared_prefix": ("shared prefix", "{}"),
    "chunk_tokens": ("chunk", "{}"), "max_num_seqs": ("batch", "{}"), "policy": ("policy", "{}"),
}  # fmt: skip
QUANTILE_LINES = (("l0", "", 1.8), ("l1", "5 2", 1.6), ("l5", "2 2", 1.6))  # class, dashes, width
STYLE = (
    TIMELINE_STYLE
    + PAGE_STYLE
    + ".wb-pic .warn{fill:#c0392b;font-weight:600}.wb-pic .no{stroke:#d55e00;stroke-width:1.4;fill:none}"
    ".wb-pic .run{fill:#0072b2;fill-opacity:.3;stroke:#0072b2}.wb-pic .sel{fill:#0072b2;fill-opacity:.14}"
    ".wb-pic .cur{stroke:#d55e00;stroke-width:1.6}.wb-pic .e{text-anchor:end}.wb-pic .m{text-anchor:middle}"
)


@dataclass(frozen=True)
class TimeView:
    """The visible part of the axis in seconds on the runner's clock, the cursor, and the selection."""

    low: float
    high: float
    cursor: float | None = None
    selection: tuple[float, float] | None = None


def draw_bench(
    log: BenchLog,
    view: TimeView,
    history: Sequence[PageSnapshot],
    numbers: dict[str, int],
    max_waiting: int,
    width: float,
    marks: bool = True,
) -> str:
    """Draw all panels in one column.

    Args:
        log: what happened.
        view: the part in sight.
        history: snapshots of the pages, oldest first.
        numbers: of the pages' owners.
        max_waiting: requests that may wait.
        width: of the picture, in pixels.
        marks: whether to draw cursor and selection; a live view has them above the picture.
    """
    across = Scale(view.low, max(view.high, view.low + 1e-4), LEFT, width - RIGHT)
    parts, y = _status(log, max_waiting)
    changes, more = _changes(log, across, y)
    top = y + more
    body: list[str] = []
    y = top + 18
    for draw in (
        _requests,
        lambda *at: _queue(*at, max_waiting),
        lambda *at: _pages(*at, history, numbers),
        lambda *at: _latency(*at, "TTFT", log.ttft),
        lambda *at: _latency(*at, "inter-token", log.itl),
    ):
        markup, high = draw(log, across, y)
        body.append(markup)
        y += high + GAP
    bottom = y - GAP
    grid = _grid(log, across, top + 12, bottom)
    legend, more = draw_legend(REQUEST_MARKS, 8, bottom + 14, width)
    axis = svg.group(
        data_axis=f"{view.low!r} {view.high!r} {across.begin!r} {across.end!r} {top!r} {bottom!r} {log.begin!r}"
    )
    return svg.document(
        width, bottom + 20 + more,
        svg.tag("style", STYLE), PATTERNS, *parts, changes, grid, *body, axis,
        _marks(view, across, top, bottom) if marks else "", legend,
        title=f"A load over time: {log.num_arrived} requests arrived, {log.num_refused} refused, {log.num_ended} ended",
    )  # fmt: skip


def describe_moment(log: BenchLog, time: float) -> str:
    """Describe what there is at a moment, in one line."""
    step = log.step_at(time)
    head = f"at {time - (log.origin or 0.0):.3f} s"
    if step is None:
        return f"{head}: no step yet"
    where = f"step {step.step}" if time <= step.end else f"after step {step.step}"
    work = f"{step.prefill_tokens} prefill and {step.decode_tokens} decode tokens in {svg.format_seconds(step.end - step.begin)}"
    values = [
        f"{name} " + " / ".join(svg.format_seconds(None if np.isnan(each) else each) for each in cut[:, 0])
        for name, cut in (("TTFT", sliding_percentiles(log.ttft, [time])), ("ITL", sliding_percentiles(log.itl, [time])))
    ]
    return (
        f"{head}, {where}: queue {step.waiting}, batch {step.running}, {step.pages_used} pages in use, {work}; "
        f"p50 / p95 / p99: {', '.join(values)}"
    )


def draw_statistics(stats: WindowStatistics, origin: float) -> str:
    """Draw a selection's figures as a table."""
    cells = [(name, _figure(value, unit)) for name, value, unit in stats.rows()]
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(figure)}</dd></div>" for name, figure in cells)
    title = f"Selected: {stats.begin - origin:.2f} s to {stats.end - origin:.2f} s"
    return svg.html(
        "<style>.wb-pic dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(15.5em,1fr));gap:1px 18px;"
        "margin:4px 8px}.wb-pic dl div{display:flex;justify-content:space-between;border-bottom:1px dotted #8888}"
        ".wb-pic dd{margin:0;font-variant-numeric:tabular-nums;font-weight:600}.wb-pic h4{margin:6px 8px 0;"
        "font-size:12px}</style>"
        f'<h4>{escape(title)}</h4><dl aria-label="{escape(title)}">{items}</dl>'
    )


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return svg.format_seconds(value) if unit == "s" else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def change_words(name: str, old: str, new: str) -> str:
    """Return a change of a setting as its mark says it: `chunk 64 → 16`."""
    known, form = SETTING_NAMES.get(name, (name, "{}"))

    def value(text: str) -> str:
        try:
            return form.format(float(text) if "%" in form else text)
        except ValueError:
            return text

    return f"{known} {value(old)} → {value(new)}"


def _status(log: BenchLog, max_waiting: int) -> tuple[list[str], float]:
    """Draw counts since the beginning, and the rates of the last seconds."""
    last = window_statistics(log, log.end - WINDOW_SECONDS, np.nextafter(log.end, np.inf))
    total = (
        f"{log.num_arrived} arrived = {log.num_refused} refused + {log.num_waiting} waiting + {log.num_running} "
        f"running + {log.num_ended} ended"
    )
    rates = (
        f"the last {WINDOW_SECONDS:g} s: {last.arrived / WINDOW_SECONDS:.1f} requests/s arrive, "
        f"{last.ended / WINDOW_SECONDS:.1f}/s end, {last.output_tokens / WINDOW_SECONDS:.0f} output tokens/s"
    )
    problem = overload(log, max_waiting)
    return [
        svg.text(8, 14, total, class_="b"),
        svg.text(8, 30, problem or rates, class_="s warn" if problem else "s faint"),
    ], 38.0


def _changes(log: BenchLog, across: Scale, y: float) -> tuple[str, float]:
    """Draw where a setting changed: two rows of labels, those without room as a line with a tip."""
    ends, parts = [0.0, 0.0], []
    for change in log.changes:
        if not across.low <= change.time <= across.high:
            continue
        words, x = change_words(change.name, change.old, change.new), across(change.time)
        wide = 5.8 * len(words) + 10
        row = next((row for row, end in enumerate(ends) if x >= end), None)
        x_text = min(x, across.end + RIGHT - wide)
        if row is not None:
            ends[row] = x + wide
            parts.append(svg.text(x_text + 3, y + 10 + 13 * row, words, class_="s"))
        parts.append(svg.line(x, y + 2, x, y + 30, class_="line chg", tip=words))
    return svg.group(*parts), 30.0


def _grid(log: BenchLog, across: Scale, top: float, bottom: float) -> str:
    """Draw the axis of time, with seconds since the first event; changes of settings go through all panels."""
    origin = log.origin or 0.0
    seconds = Scale(across.low - origin, across.high - origin, across.begin, across.end)
    parts = []
    for value in seconds.ticks(max(3, int((across.end - across.begin) / 90))):
        x = seconds(value)
        parts += [
            svg.line(x, top, x, bottom, class_="grid"),
            svg.text(x, top - 2, f"{value:g} s", class_="s faint m"),
        ]
    for change in log.changes:
        if across.low <= change.time <= across.high:
            x = across(change.time)
            parts.append(svg.line(x, top, x, bottom, class_="line chg", stroke_opacity=0.45, pointer_events="none"))
    return svg.group(*parts)


def _marks(view: TimeView, across: Scale, top: float, bottom: float) -> str:
    parts = []
    if view.selection is not None:
        low, high = (across(min(max(each, across.low), across.high)) for each in view.selection)
        parts.append(svg.rect(low, top, high - low, bottom - top, class_="sel"))
    if view.cursor is not None and across.low <= view.cursor <= across.high:
        parts.append(svg.line(across(view.cursor), top, across(view.cursor), bottom, class_="line cur"))
    return svg.group(*parts)


def _name(y: float, *lines: str) -> str:
    return "".join(
        svg.text(LEFT - 8, y + 12 + 13 * n, line, class_="s e" if not n else "s e faint") for n, line in enumerate(lines)
    )


def _requests(log: BenchLog, across: Scale, y: float) -> tuple[str, float]:
    """Draw each request in the row that it has had since it came."""
    seen = []
    for track in log.tracks.requests:
        phases = log.tracks.phases(track)
        if phases and phases[0].end >= across.low and phases[0].begin <= across.high:
            seen.append((log.row_of(track), track))
    rows = max((row for row, _ in seen), default=0) + 1
    side = min(max(ROWS_HEIGHT / rows, MIN_ROW), MAX_ROW)
    parts = [draw_request(log.tracks, track, across, y + row * side, side, track.row["request_id"]) for row, track in seen]
    return svg.group(_name(y, "requests", f"{len(seen)} in sight"), *parts), ROWS_HEIGHT


def _points(steps: Sequence[StepPoint], across: Scale, name: str) -> list[tuple[float, float]]:
    """Return (x, value) where a line of steps begins anew: the largest value of each few pixels."""
    points: list[tuple[float, float]] = []
    for step in steps:
        x, value = max(across(step.begin), across.begin), getattr(step, name)
        if points and x - points[-1][0] < PIXELS_A_POINT:
            points[-1] = points[-1][0], max(points[-1][1], value)
        else:
            points.append((x, value))
    return points


def _stairs(points: Sequence[tuple[float, float]], up: Scale, end: float) -> str:
    return "".join(
        f"{'M' if not n else 'H'}{x:.5g}{' ' if not n else 'V'}{up(value):.5g}" for n, (x, value) in enumerate(points)
    ) + (f"H{end:.5g}" if points else "")


def _visible_steps(log: BenchLog, across: Scale) -> list[StepPoint]:
    before = log.step_at(across.low)
    seen = log.steps_between(across.low, across.high)
    last = log.step_at(across.high)
    ends = ([before] if before is not None and before not in seen[:1] else [], [last] if last is not None else [])
    return [*ends[0], *seen, *(each for each in ends[1] if each not in seen[-1:] and each not in ends[0])]


def _queue(log: BenchLog, across: Scale, y: float, max_waiting: int) -> tuple[str, float]:
    """Draw the batch of each step as a filled line, the queue as a dashed one; a cross for each refused request."""
    steps = _visible_steps(log, across)
    batch, queue = _points(steps, across, "running"), _points(steps, across, "waiting")
    most = max([4.0, *(value for _, value in (*batch, *queue))])
    up, end = Scale(0, most, y + PANEL_HEIGHT, y + 4), min(across.end, max(across(log.end), across.begin))
    parts = [_name(y, "queue, batch", f"to {most:g}"), svg.line(LEFT, up(0), across.end, up(0), class_="grid")]
    if batch:
        area = _stairs(batch, up, end)
        parts += [
            svg.tag("path", class_="run", d=f"{area}V{up(0):.5g}H{batch[0][0]:.5g}z", pointer_events="none"),
            svg.tag("path", class_="line l5", stroke_width=1.8, stroke_dasharray="5 2", d=_stairs(queue, up, end)),
        ]
        parts += _labels([(up(queue[-1][1]), "l5", f"queue {steps[-1].waiting}"), (up(batch[-1][1]), "l0", f"batch {steps[-1].running}")],
                         across.end, y)  # fmt: skip
    if max_waiting <= most:
        parts.append(svg.line(LEFT, up(max_waiting), across.end, up(max_waiting), class_="line", stroke_dasharray="1 3"))
    refused = log.refused.between(across.low, across.high)[0]
    places = np.unique(np.round(np.array([across(time) for time in refused]) / 4) * 4)
    crosses = "".join(f"M{x - 2.5:.5g} {y - 1:g}l5 5m0 -5l-5 5" for x in places)
    if crosses:
        tip = f"{len(refused)} requests in sight were refused: {max_waiting} waited already"
        parts.append(svg.tag("path", class_="no", d=crosses, data_tip=tip))
    return svg.group(*parts), PANEL_HEIGHT


def _labels(labels: list[tuple[float, str, str]], x: float, top: float) -> list[str]:
    """Draw (y, class of the line, text) beside the ends of lines, none upon another."""
    parts, free = [], top - 4
    for y, css, words in sorted(labels):
        at = max(y, free + LABEL_HEIGHT / 2)
        free = at + LABEL_HEIGHT / 2
        parts += [
            svg.line(x + 3, at, x + 12, at, class_=f"line {css}", stroke_width=3),
            svg.text(x + 15, at + 4, words, class_="s"),
        ]
    return parts


def _pages(
    log: BenchLog, across: Scale, y: float, history: Sequence[PageSnapshot], numbers: dict[str, int]
) -> tuple[str, float]:
    """Draw the pages of the first panel by owner: those of `PageMap`, over time."""
    begins = {step.step: step.begin for step in log.steps}
    first, last = (log.step_at(time) for time in (across.low, across.high))
    low, high = (each.step if each is not None else 0 for each in (first, last))
    seen = [each for each in history if low <= each.step <= high and each.step in begins]
    name = _name(y, "KV cache pages", "by request")
    if not seen:
        return name, STRIP_HEIGHT
    place: Callable[[int], float] = lambda step: across(begins[step])  # noqa: E731 (it has a type)
    end = min(across.end, max(across(log.end), LEFT + 1))
    return svg.group(name, draw_strip(seen[-1], seen, 0, numbers, LEFT, y, end - LEFT, place)), STRIP_HEIGHT


def _latency(log: BenchLog, across: Scale, y: float, title: str, series: TimedValues) -> tuple[str, float]:
    """Draw percentiles of the values within a window that ends at each moment."""
    parts = [_name(y, title, f"over {WINDOW_SECONDS:g} s")]
    end = min(across.high, log.end)
    moments = np.linspace(max(across.low, log.begin), end, MOMENTS) if end > max(across.low, log.begin) else np.empty(0)
    cuts = sliding_percentiles(series, moments.tolist())
    known = cuts[~np.isnan(cuts)]
    if not len(known):
        return svg.group(*parts), PANEL_HEIGHT
    up = Scale.over(known.tolist(), y + PANEL_HEIGHT, y + 2, Axis("", log=True))
    for value in up.ticks(3):
        parts += [
            svg.line(LEFT, up(value), across.end, up(value), class_="grid"),
            svg.text(LEFT - 8, up(value) + 4, svg.format_seconds(value), class_="s faint e")
            if up(value) > y + 36 else "",
        ]  # fmt: skip
    labels = []
    for q, line, (css, dashes, wide) in zip(PERCENTILES, cuts, QUANTILE_LINES, strict=True):
        d, gap = "", True
        for time, value in zip(moments, line, strict=True):
            d += "" if np.isnan(value) else f"{'M' if gap else 'L'}{across(time):.5g} {up(value):.5g}"
            gap = bool(np.isnan(value))
        parts.append(svg.tag("path", class_=f"line {css}", stroke_width=wide, stroke_dasharray=dashes or None, d=d))
        there = line[~np.isnan(line)]
        if len(there):
            labels.append((up(there[-1]), css, f"p{q} {svg.format_seconds(there[-1])}"))
    return svg.group(*parts, *_labels(labels, across.end, y)), PANEL_HEIGHT
