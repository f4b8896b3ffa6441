"""Draw the panels of a load over one time axis. Each function returns markup and height in pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench import svg
from workbench.svg import Axis, Scale
from workbench.units import format_seconds
from workbench.widgets.live_bench.log import BenchLog, StepPoint, TimedValues
from workbench.widgets.live_bench.statistics import PERCENTILES, WINDOW_SECONDS, sliding_percentiles
from workbench.widgets.pages.data import PageSnapshot
from workbench.widgets.pages.picture import STRIP_HEIGHT, draw_strip
from workbench.widgets.timeline.picture import draw_request

LEFT, RIGHT = 104.0, 94.0  # margins in pixels: for panel names, and for the newest values
ROWS_HEIGHT, MIN_ROW, MAX_ROW = 264.0, 6.0, 16.0  # of the requests' panel with many rows; bounds of one row's height
PANEL_HEIGHT = 62.0
PIXELS_A_POINT = 2.0  # least distance of a line's points
MOMENTS = 160  # points of a percentile line
LABEL_HEIGHT = 12.0
QUANTILE_LINES = (("l0", "", 1.8), ("l1", "5 2", 1.6), ("l5", "2 2", 1.6))  # class, dashes, width


def _name(y: float, *lines: str) -> str:
    return "".join(
        svg.text(LEFT - 8, y + 12 + 13 * n, line, class_="s e" if not n else "s e faint")
        for n, line in enumerate(lines)
    )


def draw_requests(log: BenchLog, across: Scale, y: float) -> tuple[str, float]:
    """Draw each request in the row that it got at its arrival. The panel has room for the most rows so far: it grows,
    and never shrinks under the pointer."""
    seen = []
    for track in log.tracks.requests:
        phases = log.tracks.phases(track)
        if phases and phases[0].end >= across.low and phases[0].begin <= across.high:
            seen.append((log.row_of(track), track))
    rows = max((row for row, _ in seen), default=0) + 1
    side = min(max(ROWS_HEIGHT / rows, MIN_ROW), MAX_ROW)
    parts = [
        draw_request(log.tracks, track, across, y + row * side, side, track.row["request_id"]) for row, track in seen
    ]
    room = max(2 * MAX_ROW, min(ROWS_HEIGHT, log.num_rows * MAX_ROW), rows * side)
    return svg.group(_name(y, "requests", f"{len(seen)} in sight"), *parts), room


def _points(steps: Sequence[StepPoint], across: Scale, name: str) -> list[tuple[float, float]]:
    """Return the points (x, value) of a step line: the largest value within each `PIXELS_A_POINT` pixels."""
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


def draw_queue(log: BenchLog, across: Scale, y: float, max_waiting: int) -> tuple[str, float]:
    """Draw the batch of each step as a filled line, the queue as a dashed one, refused requests as crosses."""
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
        last = steps[-1]
        labels = [(up(queue[-1][1]), "l5", f"queue {last.waiting}"), (up(batch[-1][1]), "l0", f"batch {last.running}")]
        parts += _labels(labels, across.end, y)
    if max_waiting <= most:
        parts.append(
            svg.line(LEFT, up(max_waiting), across.end, up(max_waiting), class_="line", stroke_dasharray="1 3")
        )
    refused = log.refused.between(across.low, across.high)[0]
    places = np.unique(np.round(np.array([across(time) for time in refused]) / 4) * 4)
    crosses = "".join(f"M{x - 2.5:.5g} {y - 1:g}l5 5m0 -5l-5 5" for x in places)
    if crosses:
        tip = f"{len(refused)} requests in sight were refused: {max_waiting} waited already"
        parts.append(svg.tag("path", class_="no", d=crosses, data_tip=tip))
    return svg.group(*parts), PANEL_HEIGHT


def _labels(labels: list[tuple[float, str, str]], x: float, top: float) -> list[str]:
    """Draw labels (y, CSS class of the line, text) right of x, moved down where they would overlap."""
    parts, free = [], top - 4
    for y, css, words in sorted(labels):
        at = max(y, free + LABEL_HEIGHT / 2)
        free = at + LABEL_HEIGHT / 2
        parts += [
            svg.line(x + 3, at, x + 12, at, class_=f"line {css}", stroke_width=3),
            svg.text(x + 15, at + 4, words, class_="s"),
        ]
    return parts


def draw_pages(
    log: BenchLog, across: Scale, y: float, history: Sequence[PageSnapshot], numbers: dict[str, int]
) -> tuple[str, float]:
    """Draw the pages of the first KV cache by owner over time, in the colours of `PageMap`."""
    begins = {step.step: step.begin for step in log.steps}
    first, last = (log.step_at(time) for time in (across.low, across.high))
    low, high = (each.step if each is not None else 0 for each in (first, last))
    seen = [each for each in history if low <= each.step <= high and each.step in begins]
    name = _name(y, "KV cache pages", "by request")
    if not seen:
        return name, STRIP_HEIGHT
    end = min(across.end, max(across(log.end), LEFT + 1))
    return svg.group(
        name, draw_strip(seen[-1], seen, 0, numbers, LEFT, y, end - LEFT, lambda step: across(begins[step]))
    ), STRIP_HEIGHT


def draw_latency(log: BenchLog, across: Scale, y: float, title: str, series: TimedValues) -> tuple[str, float]:
    """Draw percentiles over a sliding window of `WINDOW_SECONDS`."""
    parts = [_name(y, title, f"over {WINDOW_SECONDS:g} s")]
    end = min(across.high, log.end)
    moments = np.linspace(max(across.low, log.begin), end, MOMENTS) if end > max(across.low, log.begin) else np.empty(0)
    cuts = sliding_percentiles(series, moments.tolist())
    cuts = np.where(cuts >= svg.MIN_DRAWABLE, cuts, np.nan)  # a logarithmic axis has no place for 0
    known = cuts[~np.isnan(cuts)]
    if not len(known):
        return svg.group(*parts), PANEL_HEIGHT
    up = Scale.over(known.tolist(), y + PANEL_HEIGHT, y + 2, Axis("", log=True))
    for value in up.ticks(3):
        parts += [
            svg.line(LEFT, up(value), across.end, up(value), class_="grid"),
            svg.text(LEFT + 4, up(value) - 2, format_seconds(value), class_="s faint over"),
        ]
    labels = []
    for q, line, (css, dashes, wide) in zip(PERCENTILES, cuts, QUANTILE_LINES, strict=True):
        d, gap = "", True
        for time, value in zip(moments, line, strict=True):
            d += "" if np.isnan(value) else f"{'M' if gap else 'L'}{across(time):.5g} {up(value):.5g}"
            gap = bool(np.isnan(value))
        parts.append(svg.tag("path", class_=f"line {css}", stroke_width=wide, stroke_dasharray=dashes or None, d=d))
        there = line[~np.isnan(line)]
        if len(there):
            labels.append((up(there[-1]), css, f"p{q} {format_seconds(there[-1])}"))
    return svg.group(*parts, *_labels(labels, across.end, y)), PANEL_HEIGHT
