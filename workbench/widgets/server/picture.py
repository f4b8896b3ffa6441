"""Draw a server: figures above, requests over time below, then tokens and decisions of a chosen request.

A bar's outline, height and dashes show its phase in addition to its colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median

from workbench import svg
from workbench.display import truncate_text
from workbench.serve.watch.snapshot import Meter, RequestStatus, RequestTrace, ServerSnapshot
from workbench.svg import Scale, truncate_to_width
from workbench.units import format_duration, format_percent, format_seconds
from workbench.widgets.flow import flow, paragraph
from workbench.widgets.server.data import (
    RequestPhase,
    SpanAxis,
    TokenDelay,
    longest,
    phases_of,
    request_tip,
    summarize,
    token_delays,
    visible_requests,
)
from workbench.widgets.time_axis.picture import draw_ticks

RIGHT = 60.0
NAMES_WIDTH, NAMES_SHARE = 300.0, 0.3125  # pixels for an id of 41 letters; most of a narrow picture's width
LETTER_WIDTH = 7.0  # pixels of a wide font's letters at size 11
ROW_HEIGHT = 17.0
MAX_TALL_ROWS = 24  # rows visible at once; more rows scroll
MAX_TOKENS, MAX_DECISIONS = 400, 14  # the last ones of a trace are drawn
STRIP_HEIGHT = 34.0
FIGURES_TOP = 66.0
FIGURES_HEIGHT = 112.0
COLUMNS = (0.42, 0.72)  # begin of the second and third group of figures, as a fraction of the width
LATENCIES_WIDTH = 240.0
MIN_WIDTH_OF_THREE = 860.0  # pixels for three groups side by side
MARKS = {"cancelled": "M-4 -4L4 4M-4 4L4 -4", "failed": "M0 -5V1.5M0 3.5V5"}
STYLE = (
    ".wb-pic .pf{fill:#e69f00;fill-opacity:.55}.wb-pic .de{fill:#0072b2;fill-opacity:.85}"
    ".wb-pic .qu{fill:none;stroke:currentColor;stroke-dasharray:3 2;stroke-opacity:.8}"
    ".wb-pic .sb{fill:#d55e00;fill-opacity:.25;stroke:#d55e00;stroke-width:1.4}"
    ".wb-pic .id{fill:currentColor;fill-opacity:.08;stroke:currentColor;stroke-opacity:.75;stroke-dasharray:2 2}"
    ".wb-pic .em{fill:none;stroke:currentColor;stroke-opacity:.45}.wb-pic .over{fill:#d55e00}"
    ".wb-pic .mark{fill:none;stroke:#d55e00;stroke-width:2}.wb-pic .odd{fill:currentColor;fill-opacity:.04}"
    ".wb-pic .hit{fill:transparent}.wb-pic .on{fill:none;stroke:currentColor;stroke-width:1.2}"
    ".wb-pic .s{font-size:11px}.wb-pic .b{font-weight:600}.wb-pic .big{font-size:17px;font-weight:600}"
    ".wb-pic .wb-answer{font:13px/1.7 var(--jp-code-font-family,ui-monospace,monospace);white-space:pre-wrap;"
    "overflow-wrap:anywhere;max-height:16em;overflow-y:auto;margin:2px 8px 6px}"
    ".wb-pic .wb-answer span{border-bottom:2px solid transparent}.wb-pic .wb-answer .slow{border-color:#d55e00}"
    ".wb-pic .wb-answer span:nth-child(even){background:rgba(128,128,128,.18)}"
    ".wb-pic .wb-reasons{font-size:12px;margin:2px 8px;padding:0;list-style:none}.wb-pic h4{font-size:13px;margin:8px}"
)
PHASE_SHAPES = {  # CSS class, and the bar's distance from the row's edges in pixels
    "waiting": ("qu", 6.5), "prefill": ("pf", 2.0), "decode": ("de", 4.0), "preempted": ("sb", 2.0),
}  # fmt: skip


def draw_server(
    snapshot: ServerSnapshot,
    seconds: float = 60.0,
    chosen: str = "",
    trace: RequestTrace | None = None,
    address: str = "",
    width: float = svg.PICTURE_WIDTH,
) -> str:
    """Draw a snapshot with the requests of the last `seconds`, and below it the trace of the request `chosen`."""
    axis = SpanAxis.over(snapshot, seconds)
    rows = visible_requests(snapshot, axis)
    head, y = _head(snapshot, address, width)
    top = svg.document(width, y, svg.tag("style", STYLE), *head, title=summarize(snapshot))
    across = Scale(axis.low, axis.high, _names_width(width), width - RIGHT)
    stop = chosen if any(each.id == chosen for each in rows) else rows[0].id if rows else ""
    bars = [
        _row(each, place * ROW_HEIGHT, snapshot.time, across, each.id == chosen, each.id == stop)
        for place, each in enumerate(rows)
    ]
    body = svg.document(
        width, max(1.0, ROW_HEIGHT * len(rows)), *bars, title=f"{len(rows)} requests over time, the latest first"
    )
    if len(rows) > MAX_TALL_ROWS:
        tall = int(MAX_TALL_ROWS * ROW_HEIGHT)
        body = f'<div data-scroll="rows" tabindex="-1" style="max-height:{tall}px;overflow-y:auto">{body}</div>'
    parts = [top, _axis(axis, across), body, _legend(snapshot, len(rows), width)]
    found = next((each for each in snapshot.recent if each.id == chosen), None)
    if found is not None:
        parts.append(_trace(found, trace, width))
    return svg.html(*parts)


def _names_width(width: float) -> float:
    return min(NAMES_WIDTH, NAMES_SHARE * width)


def _head(snapshot: ServerSnapshot, address: str, width: float) -> tuple[list[str], float]:
    """Draw name and states, three groups of figures (the third below the others in a narrow picture), and meters.

    Return the markup and the y of its end."""
    up = f"up {format_duration(snapshot.uptime)}" if snapshot.uptime else ""
    parts = [
        svg.text(8, 18, truncate_to_width(snapshot.model or "server", width / 2 - 16), class_="b", tip=snapshot.model),
        svg.text(width - 8, 18, "   ".join(filter(None, (address, up))), class_="s faint", text_anchor="end"),
    ]
    states = [(state, f"{count:,} {state}", count) for state, count in snapshot.requests.items()]
    places = flow([40 + 7.2 * len(caption) for _, caption, _ in states], 8, width)
    for (state, caption, count), (x, row) in zip(states, places, strict=True):
        y = 38.0 + 20 * row
        parts += [_state_mark(state, x + 9, y), svg.text(x + 24, y + 4, caption, class_="" if count else "faint")]
    top = FIGURES_TOP + 20 * max((row for _, row in places), default=0)
    beside = width >= MIN_WIDTH_OF_THREE
    second, third = (width * share for share in COLUMNS) if beside else (width - LATENCIES_WIDTH, 8.0)
    parts += [_rates(snapshot, top, second - 48), _latencies(snapshot, second, top)]
    top += 0 if beside else FIGURES_HEIGHT
    parts.append(_pages(snapshot, third, top, width - third - 8))
    y = top + FIGURES_HEIGHT
    if snapshot.meters:
        markup, height = _meters(snapshot.meters, y, width)
        parts.append(markup)
        y += height
    return parts, y


def _state_mark(state: str, x: float, y: float) -> str:
    shape = PHASE_SHAPES.get(state)
    if shape is not None:
        css, inset = shape
        tall = ROW_HEIGHT - 2 * inset
        return svg.rect(x - 9, y - tall / 2, 18, tall, class_=css)
    if state in MARKS:
        return svg.tag("path", class_="mark", d=MARKS[state], transform=f"translate({x:g},{y:g})")
    return svg.tag("path", class_="line", d=f"M{x - 5:g} {y:g}l4 4l6 -8")


def _rates(snapshot: ServerSnapshot, y: float, wide: float) -> str:
    """Draw two strips, output and prompt tokens for each second, each scaled to its own maximum."""
    x, parts = 8.0, []
    strips = (
        ("output", "0", snapshot.output_tokens_per_second, [each.output_tokens for each in snapshot.rates]),
        ("prompt", "1", snapshot.prompt_tokens_per_second, [each.prompt_tokens for each in snapshot.rates]),
    )
    for name, colour, now, values in strips:
        most = max(values, default=0)
        parts.append(svg.text(x, y + 12, f"{now:,.1f}", class_="big"))
        caption = truncate_to_width(f"{name} tokens a second; to {most:,} in {len(values)} s", wide - 62)
        parts.append(svg.text(x + 62, y + 12, caption, class_="s faint"))
        base = y + 16 + STRIP_HEIGHT - 8
        parts.append(svg.line(x, base, x + wide, base, class_="grid"))
        if most:
            parts.append(_strip(values, Scale(0, max(1, len(values) - 1), x, x + wide), base, most, colour))
        y += STRIP_HEIGHT + 18
    return "".join(parts)


def _strip(values: Sequence[int], across: Scale, base: float, most: int, colour: str) -> str:
    points = [(across(place), base - (STRIP_HEIGHT - 10) * value / most) for place, value in enumerate(values)]
    area = svg.polygon([(points[0][0], base), *points, (points[-1][0], base)], class_=f"c{colour}", fill_opacity=".25")
    return area + svg.path(points, class_=f"l{colour} rate", stroke_width="1.6")


def _latencies(snapshot: ServerSnapshot, x: float, y: float) -> str:
    """Draw a table of percentiles; the bar below a figure is relative to the largest of its row."""
    parts = [svg.text(x + 96 + 62 * place, y + 8, f"p{q}", class_="s faint", text_anchor="end")
             for place, q in enumerate((50, 90, 99))]  # fmt: skip
    for number, (name, cuts) in enumerate((("TTFT", snapshot.ttft), ("TPOT", snapshot.tpot))):
        top = y + 28 + 40 * number
        parts.append(svg.text(x, top, name, class_="b"))
        parts.append(svg.text(x, top + 13, f"of {cuts.count:,}", class_="s faint"))
        for place, value in enumerate((cuts.p50, cuts.p90, cuts.p99)):
            at = x + 96 + 62 * place
            parts.append(svg.text(at, top, format_seconds(value), text_anchor="end"))
            if value is not None and cuts.p99:
                share = min(1.0, max(0.0, value / cuts.p99))
                parts.append(svg.rect(at - 50 * share, top + 5, 50 * share, 4, class_="c2"))
    parts.append(svg.text(x, y + 100, f"of the last {snapshot.window:g} s", class_="s faint"))
    return "".join(parts)


def _pages(snapshot: ServerSnapshot, x: float, y: float, wide: float) -> str:
    pages, share = snapshot.pages, snapshot.cache_hit_share
    parts = [svg.text(x, y + 8, "pages of the KV cache", class_="s faint")]
    at = x
    for css, count in (("c0", pages.used), ("id", pages.idle), ("em", pages.free)):
        part = wide * count / pages.total if pages.total else 0.0
        if count:
            parts.append(svg.rect(at, y + 14, part, 12, class_=css))
        at += part
    caption = f"{pages.used:,} used, {pages.idle:,} idle (cached), {pages.free:,} free"
    parts.append(svg.text(x, y + 42, caption, class_="s"))
    parts.append(svg.text(x, y + 64, "prompt tokens found in the prefix cache", class_="s faint"))
    parts.append(svg.rect(x, y + 70, wide, 12, class_="em"))
    if share:
        parts.append(svg.rect(x, y + 70, wide * min(1.0, share), 12, class_="c2"))
    found = format_percent(share)
    caption = f"{found}: {snapshot.cached_tokens:,} of {snapshot.prompt_tokens:,}"
    parts.append(svg.text(x, y + 98, caption, class_="s"))
    return "".join(parts)


def _meters(meters: Sequence[Meter], y: float, width: float) -> tuple[str, float]:
    """Draw limits and cost in one or two columns: a bar of the used part, in red if nothing is left."""
    parts = [svg.text(8, y + 12, "limits and money", class_="s faint")]
    columns = 2 if width >= MIN_WIDTH_OF_THREE else 1
    wide = (width - 40) / 2
    for number, meter in enumerate(meters):
        x, top = 8 + (number % columns) * (wide + 24), y + 22 + 20 * (number // columns)
        full = meter.limit is not None and meter.used >= meter.limit
        bound = "" if meter.limit is None else f" of {meter.limit:,.6g}"
        again = f", free in {format_duration(meter.resets_in)}" if meter.resets_in else ""
        caption = f"{meter.used:,.6g}{bound} {meter.unit}{again}"
        parts.append(svg.text(x, top + 10, truncate_text(meter.name, 25), class_="s", tip=f"{meter.name}\n{caption}"))
        if meter.limit:
            parts.append(svg.rect(x + 160, top + 2, 70, 9, class_="em"))
            share = min(1.0, max(0.0, meter.used / meter.limit))
            parts.append(svg.rect(x + 160, top + 2, 70 * share, 9, class_="over" if full else "c4"))
        parts.append(svg.text(x + 238, top + 10, caption, class_="s b" if full else "s"))
    return "".join(parts), 30.0 + 20 * -(-len(meters) // columns)


def _axis(axis: SpanAxis, across: Scale) -> str:
    """Draw the time axis, as times before its right end."""
    right = across.end + RIGHT
    parts = [
        svg.text(8, 13, "requests, the latest first", class_="s faint"), draw_ticks(across, axis.high, 16, 20, right),
        svg.line(across.begin, 20, across.end, 20, class_="grid"),
    ]  # fmt: skip
    return svg.document(right, 21, *parts, title=f"Time axis of {axis.high - axis.low:.3g} seconds")


def _row(request: RequestStatus, y: float, now: float, across: Scale, is_chosen: bool, is_stop: bool) -> str:
    tip = request_tip(request, now)
    width = across.end + RIGHT
    parts = [svg.rect(0, y, width, ROW_HEIGHT, class_="odd")] if round(y / ROW_HEIGHT) % 2 else []
    name = truncate_text(request.id, int((across.begin - 12) / LETTER_WIDTH))
    css = "s b" if is_chosen else "s"
    parts.append(svg.text(across.begin - 8, y + ROW_HEIGHT - 5, name, class_=css, text_anchor="end"))
    phases = phases_of(request, now)
    parts += [_bar(phase, y, across) for phase in phases]
    end = across(min(across.high, now if request.ended is None else request.ended))
    caption = f"{request.output_tokens:,}" if request.output_tokens else ""
    if request.state in MARKS:
        where = f"translate({end + 8:g},{y + ROW_HEIGHT / 2:g})"
        parts.append(svg.tag("path", class_="mark", d=MARKS[request.state], transform=where))
        end += 14
    parts.append(svg.text(end + 4, y + ROW_HEIGHT - 5, caption, class_="s faint"))
    if is_chosen:
        parts.append(svg.rect(1, y + 0.5, width - 2, ROW_HEIGHT - 1, class_="on"))
    parts.append(
        svg.rect(
            0,
            y,
            width,
            ROW_HEIGHT,
            class_="hit",
            tip=tip,
            key=f"@{request.id}",
            tabindex=0 if is_stop else -1,
            role="button",
            aria_label=tip.replace("\n", "; "),
            aria_pressed="true" if is_chosen else "false",
        )  # fmt: skip
    )
    return "".join(parts)


def _bar(phase: RequestPhase, y: float, across: Scale) -> str:
    if phase.end < across.low or phase.begin > across.high:
        return ""
    left, right = across(max(phase.begin, across.low)), across(min(phase.end, across.high))
    css, inset = PHASE_SHAPES[phase.name]
    return svg.rect(left, y + inset, max(right - left, 0.8), ROW_HEIGHT - 2 * inset, class_=f"{css} ph")


def _legend(snapshot: ServerSnapshot, num_shown: int, width: float) -> str:
    parts, x = [], 8.0
    for name, (css, inset) in PHASE_SHAPES.items():
        tall = ROW_HEIGHT - 2 * inset
        parts += [svg.rect(x, 10 - tall / 2, 22, tall, class_=css), svg.text(x + 28, 14, name, class_="s")]
        x += 44 + 6.4 * len(name)
    beside = width >= MIN_WIDTH_OF_THREE  # else the caption is below the shapes
    caption = "the number after a bar: output tokens. Click a request for its trace"
    if hidden := len(snapshot.recent) - num_shown:
        caption += f"; {hidden} earlier ones are not in sight"
    x, y = (x + 8, 14.0) if beside else (8.0, 32.0)
    lines = paragraph(caption, x, y, width - x - 8, class_="s faint")
    parts += lines
    return svg.document(width, y - 7 + 15 * len(lines), *parts, title="What the bars mean")


def _trace(request: RequestStatus, trace: RequestTrace | None, width: float) -> str:
    """Draw a request's tokens with their delays, its text token by token, and the scheduler's reasons."""
    about = request_tip(request, request.ended or request.last_token or request.arrival).replace("\n", " · ")
    parts = [svg.tag("h4", escape(about))]
    if trace is None or not (trace.tokens or trace.decisions):
        return "".join([*parts, svg.tag("p", "No token and no decision of it is kept.", class_="wb-reasons")])
    delays = token_delays(request, trace)[-MAX_TOKENS:]
    if delays:
        slow = 2 * median(each.seconds for each in delays)
        tips = [
            f"token {each.index + 1}, id {each.token_id}, in step {each.step}: {format_seconds(each.seconds)} after "
            f"{'the one before' if each.index else 'its arrival'}, at {format_seconds(each.time - request.arrival)}"
            for each in delays
        ]
        marks = ["slow" if each.index and each.seconds > slow else None for each in delays]
        parts += [_delays(delays, tips, marks, width), _text(delays, tips, marks)]
    items = [
        f"{format_seconds(max(0.0, each.time - request.arrival))}, step {each.step}: "
        + (each.reason if each.reason.startswith(each.action) else f"{each.action}: {each.reason}")
        for each in trace.decisions[-MAX_DECISIONS:]
    ]
    if len(trace.decisions) > MAX_DECISIONS:
        items.insert(0, f"{len(trace.decisions) - MAX_DECISIONS} earlier decisions, and then:")
    return "".join([*parts, svg.tag("ul", *(svg.tag("li", escape(item)) for item in items), class_="wb-reasons")])


def _delays(delays: Sequence[TokenDelay], tips: Sequence[str], marks: Sequence[str | None], width: float) -> str:
    """Draw a bar for each token but the first: the time since the token before it."""
    most, base, left = longest(delays), 62.0, _names_width(width)
    across = Scale(delays[0].index, max(delays[-1].index, delays[0].index + 8) + 1, left, width - RIGHT)
    wide = max(1.0, min(14.0, across(1) - across(0) - 1))
    caption = f"between tokens, to {format_seconds(most)}" if most else "one token"
    parts = [
        svg.text(left - 8, base - 4, caption, class_="s faint", text_anchor="end"),
        svg.line(left, base, width - RIGHT, base, class_="grid"),
    ]
    for each, tip, mark in zip(delays, tips, marks, strict=True):
        if each.index and most:
            tall = max(0.8, (base - 8) * each.seconds / most)
            css = "over" if mark else "c0"
            parts.append(svg.rect(across(each.index), base - tall, wide, tall, class_=f"{css} tok", tip=tip))
    return svg.document(width, base + 4, *parts, title=f"Times between {len(delays)} tokens, {caption}")


def _text(delays: Sequence[TokenDelay], tips: Sequence[str], marks: Sequence[str | None]) -> str:
    """Draw the text token by token; a token without text of its own is a dot."""
    spans = [
        svg.tag("span", escape(each.text.replace("\n", "↵\n")) or "·", class_=mark, data_tip=tip)
        for each, tip, mark in zip(delays, tips, marks, strict=True)
    ]
    return svg.tag("div", *spans, class_="wb-answer", data_scroll="")
