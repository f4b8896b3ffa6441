"""Draw a load over one time axis: requests, queue and batch, pages, latency percentiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from workbench import svg
from workbench.svg import Scale
from workbench.units import format_seconds
from workbench.widgets.flow import paragraph
from workbench.widgets.live_bench.log import BenchLog
from workbench.widgets.live_bench.panels import LEFT, RIGHT, draw_latency, draw_pages, draw_queue, draw_requests
from workbench.widgets.live_bench.statistics import (
    WINDOW_SECONDS,
    WindowStatistics,
    overload,
    sliding_percentiles,
    window_statistics,
)
from workbench.widgets.pages.data import PageSnapshot
from workbench.widgets.pages.picture import PATTERNS
from workbench.widgets.pages.picture import STYLE as PAGE_STYLE
from workbench.widgets.time_axis.picture import TimeView, draw_marks, draw_ticks, place_axis
from workbench.widgets.timeline.picture import REQUEST_MARKS, draw_legend
from workbench.widgets.timeline.picture import STYLE as TIMELINE_STYLE

GAP = 16.0  # between two panels
CHANGE_ROWS = 3  # rows of labels for changed settings
LONGEST_STATUS = 860.0  # pixels of the longest overload message
FIGURE_WIDTH = 250.0  # pixels of a name and its figure
SETTING_NAMES = {
    "rate": ("load", "{}/s"), "long_share": ("long", "{:.0%}"), "shared_prefix": ("shared prefix", "{}"),
    "chunk_tokens": ("chunk", "{}"), "max_num_seqs": ("batch", "{}"), "policy": ("policy", "{}"),
}  # fmt: skip
STYLE = (
    TIMELINE_STYLE
    + PAGE_STYLE
    + ".wb-pic .warn{fill:#c0392b;font-weight:600}.wb-pic .no{stroke:#d55e00;stroke-width:1.4;fill:none}"
    ".wb-pic .run{fill:#0072b2;fill-opacity:.3;stroke:#0072b2}.wb-pic .e{text-anchor:end}"
    ".wb-pic .over{stroke:var(--jp-layout-color0,#fff);stroke-width:3;paint-order:stroke;pointer-events:none}"
)


def draw_bench(
    log: BenchLog,
    view: TimeView,
    history: Sequence[PageSnapshot],
    numbers: dict[str, int],
    max_waiting: int,
    width: float,
    marks: bool = True,
    note: str = "",
) -> str:
    """Draw all panels in one column.

    Args:
        log: what happened.
        view: the visible part of the axis.
        history: snapshots of the pages, oldest first.
        numbers: colour number of each page owner.
        max_waiting: limit of the queue, in requests.
        width: width of the picture in pixels.
        marks: whether to draw cursor and selection; in a live view the browser draws them.
        note: text after the rates.
    """
    across = view.across(LEFT, width - RIGHT)
    parts, y = _status(log, max_waiting, width, note)
    changes, more = _changes(log, across, y)
    top = y + more
    body: list[str] = []
    y = top + 18
    panels: tuple[Callable[[float], tuple[str, float]], ...] = (
        lambda y: draw_requests(log, across, y),
        lambda y: draw_queue(log, across, y, max_waiting),
        lambda y: draw_pages(log, across, y, history, numbers),
        lambda y: draw_latency(log, across, y, "TTFT", log.ttft),
        lambda y: draw_latency(log, across, y, "inter-token", log.itl),
    )
    for draw in panels:
        markup, high = draw(y)
        body.append(markup)
        y += high + GAP
    bottom = y - GAP
    grid = _grid(log, across, top + 12, bottom, width)
    legend, more = draw_legend(REQUEST_MARKS, 8, bottom + 14, width)
    return svg.document(
        width, bottom + 20 + more,
        svg.tag("style", STYLE), PATTERNS, *parts, changes, grid, *body,
        place_axis(across, top, bottom, log.begin), draw_marks(view, across, top, bottom) if marks else "", legend,
        title=f"A load over time: {log.num_arrived} requests arrived, {log.num_refused} refused, {log.num_ended} ended",
    )  # fmt: skip


def describe_moment(log: BenchLog, time: float) -> str:
    """Describe step, queue, batch, pages and latency percentiles at a time, in one line."""
    step = log.step_at(time)
    head = f"at {time - (log.origin or 0.0):.3f} s"
    if step is None:
        return f"{head}: {f'dropped, {kept_words(log)}' if log.has_dropped else 'no step yet'}"
    where = f"step {step.step}" if time <= step.end else f"after step {step.step}, which had"
    took = format_seconds(step.end - step.begin)
    work = f"{step.prefill_tokens} prefill and {step.decode_tokens} decode tokens in {took}"
    values = [
        f"{name} " + " / ".join(format_seconds(None if np.isnan(each) else each) for each in cut[:, 0])
        for name, cut in (
            ("TTFT", sliding_percentiles(log.ttft, [time])),
            ("ITL", sliding_percentiles(log.itl, [time])),
        )
    ]
    return (
        f"{head}, {where}: queue {step.waiting}, batch {step.running}, {step.pages_used} pages in use, {work}; "
        f"p50 / p95 / p99: {', '.join(values)}"
    )


def kept_words(log: BenchLog) -> str:
    """Return a text that states how many seconds the log keeps."""
    return f"only the last {log.kept_seconds:g} s are kept"


def draw_statistics(stats: WindowStatistics, origin: float, width: float) -> str:
    """Draw a selection's figures as a table with several figures a row, as `width` (pixels) allows."""
    cells = [(name, _figure(value, unit)) for name, value, unit in stats.rows()]
    columns = max(1, int(width // FIGURE_WIDTH))
    rows = [cells[first : first + columns] for first in range(0, len(cells), columns)]
    body = "".join(f"<tr>{''.join(map(_cells, row))}</tr>" for row in rows)
    title = f"Selected: {stats.begin - stats.dropped - origin:.2f} s to {stats.end - origin:.2f} s"
    if stats.dropped:
        left = f"the figures are from {stats.begin - origin:.2f} s on" if stats.seconds else "no figures are left"
        title += f"; of them {stats.dropped:.2f} s were dropped, {left}"
    return svg.html(
        "<style>.wb-pic table{border-collapse:collapse;margin:4px 8px;font-size:12px}.wb-pic caption{text-align:left;"
        "font-weight:600;padding:2px 0}.wb-pic tr{background:none}.wb-pic th{font-weight:400;text-align:left;"
        "padding:2px 8px 2px 0;white-space:nowrap}.wb-pic td{font-weight:600;text-align:right;padding:2px 26px 2px 0;"
        "white-space:nowrap;font-variant-numeric:tabular-nums}.wb-pic th,.wb-pic td{border:0;"
        "border-bottom:1px dotted #8888}</style>"
        f"<table><caption>{escape(title)}</caption><tbody>{body}</tbody></table>"
    )


def _cells(figure: tuple[str, str]) -> str:
    return f'<th scope="row">{escape(figure[0])}</th><td>{escape(figure[1])}</td>'


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return format_seconds(value) if unit == "s" else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def change_words(name: str, old: str, new: str) -> str:
    """Return the label of a changed setting, such as `chunk 64 → 16`."""
    known, form = SETTING_NAMES.get(name, (name, "{}"))

    def value(text: str) -> str:
        try:
            return form.format(float(text) if "%" in form else text)
        except ValueError:
            return text

    return f"{known} {value(old)} → {value(new)}"


def _status(log: BenchLog, max_waiting: int, width: float, note: str) -> tuple[list[str], float]:
    """Draw the counts since the beginning, and the latest rates or an overload message; return markup and height."""
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
    lines = paragraph(problem or rates + note, 8, 30, width - 16, class_="s warn" if problem else "s faint")
    # Leave space for an overload message, so that the panels below do not move when it appears.
    return [svg.text(8, 14, total, class_="b"), *lines], 38.0 if width > LONGEST_STATUS else 53.0


def _changes(log: BenchLog, across: Scale, y: float) -> tuple[str, float]:
    """Draw a line with a tooltip at each change of a setting, and a label where it fits; return markup and height."""
    ends, lines, labels = [0.0] * CHANGE_ROWS, list[str](), list[str]()
    for change in log.changes:
        if not across.low <= change.time <= across.high:
            continue
        words, x = change_words(change.name, change.old, change.new), across(change.time)
        wide = 5.8 * len(words) + 10
        row = next((row for row, end in enumerate(ends) if x >= end), None)
        x_text = min(x, across.end + RIGHT - wide)
        if row is not None:
            ends[row] = x + wide
            labels.append(svg.text(x_text + 3, y + 10 + 13 * row, words, class_="s over"))
        lines.append(svg.line(x, y + 2, x, y + 4 + 13 * CHANGE_ROWS, class_="line chg", tip=words))
    return svg.group(*lines, *labels), 4.0 + 13 * CHANGE_ROWS


def _grid(log: BenchLog, across: Scale, top: float, bottom: float, width: float) -> str:
    """Draw the time axis, and lines through all panels at changes of settings."""
    parts = [draw_ticks(across, log.origin or 0.0, top, bottom, width)]
    for change in log.changes:
        if across.low <= change.time <= across.high:
            x = across(change.time)
            parts.append(svg.line(x, top, x, bottom, class_="line chg", stroke_opacity=0.45, pointer_events="none"))
    return svg.group(*parts)
