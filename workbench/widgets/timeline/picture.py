"""Draw steps and requests over time. A bar's height and outline show its kind in addition to its colour."""

from __future__ import annotations

from collections.abc import Sequence

from workbench import svg
from workbench.display import truncate_text
from workbench.svg import Scale
from workbench.trace.agent_tracks import AgentTrack
from workbench.trace.events import SettingsChanged
from workbench.trace.recorder import row_name
from workbench.trace.slices import Moment, Track
from workbench.trace.tracks import Tracks
from workbench.widgets.flow import flow, paragraph
from workbench.widgets.time_axis.picture import TimeView, draw_marks, draw_ticks, place_axis
from workbench.widgets.timeline.data import (
    TimelineBar,
    bar_text,
    bar_tip,
    describe_decision,
    merge_moments,
    merge_slices,
    merge_steps,
    request_tip,
    step_tip,
    visible_range,
)

WIDTH, LEFT, RIGHT = 960.0, 160.0, 24.0  # pixels: default width of the picture, and margins of the bars
ROW_HEIGHT = 22.0  # pixels of a step's prefill bar, and of its decode bar
MAX_TALL_ROWS = 64  # rows visible at once; with more requests, only active ones are drawn, and the rows scroll
MAX_REQUESTS = 512  # rows drawn
MIN_TOKEN_SPACING = 6.0  # least mean distance of tokens that are drawn, in pixels
MAX_NAME_LETTERS = 22  # letters of a request's name
MAX_DECISIONS = 14  # listed decisions of the chosen request
PHASES = ("queue", "prefill", "decode", "round", "wait", "call")  # the last three belong to agents
REQUEST_MARKS = (  # class, height and caption
    ("qu", 4.0, "queue"), ("ch", 12.0, "prefill, a chunk"), ("pf", 12.0, "prefill, between chunks"),
    ("de", 8.0, "decode, its tokens"), ("sb", 12.0, "preempted"),
)  # fmt: skip
AGENT_MARKS = (("rd", 12.0, "an agent's round"), ("ca", 8.0, "a call"))
STEPS_ROW = -1  # the row of the steps, in place of a request's number
STYLE = (
    ".wb-pic .pf{fill:#e69f00;fill-opacity:.25}.wb-pic .de{fill:#0072b2;fill-opacity:.85}"
    ".wb-pic .qu{fill:none;stroke:currentColor;stroke-dasharray:3 2;stroke-opacity:.8}"
    ".wb-pic .rd{fill:#009e73;fill-opacity:.35}.wb-pic .ca{fill:#cc79a7;fill-opacity:.85}"
    ".wb-pic .sb{fill:var(--jp-layout-color0,#fff);stroke:#d55e00;stroke-width:1.4}"  # it covers the decode bar
    ".wb-pic .ch{fill:#e69f00;stroke:var(--jp-layout-color0,#fff);stroke-width:.6}"
    ".wb-pic .cross{fill:none;stroke:#d55e00;pointer-events:none}.wb-pic .hit{fill:transparent}"
    ".wb-pic .tk{pointer-events:none;fill:none;stroke:var(--jp-layout-color0,#fff);stroke-opacity:.7}"
    ".wb-pic .dc{fill:currentColor}.wb-pic .in{pointer-events:none;text-anchor:middle;font-size:9px}"
    ".wb-pic .in.w{fill:#fff;stroke:#0072b2}.wb-pic .in.k{fill:#000;stroke:#e69f00}"
    ".wb-pic .in{stroke:var(--jp-layout-color0,#fff);stroke-width:2.5;paint-order:stroke}"
    ".wb-pic .s{font-size:11px}.wb-pic .b{font-weight:600}"
    ".wb-pic .chg{stroke:#d55e00;stroke-width:2;stroke-dasharray:4 2}"
    ".wb-pic .odd{fill:currentColor;fill-opacity:.04}"
)


def draw_timeline(tracks: Tracks, view: TimeView, chosen: int = -1, width: float = WIDTH, marks: bool = True) -> str:
    """Draw the visible time, `width` pixels wide; with `marks` also the cursor and the selection.

    `chosen` is the number of the request whose decisions are listed, or -1."""
    begin = tracks.begin if tracks.steps or tracks.requests else 0.0
    across = view.across(LEFT, width - RIGHT)
    rows, seen = _visible_requests(tracks, across), merge_steps(tracks, across)
    few = len(rows) <= MAX_TALL_ROWS
    side = 17.0 if len(rows) <= 40 else 14.0
    drawn = rows[:MAX_REQUESTS]
    # The tabulator key stops once in the chart, at the chosen request or the first step; arrow keys move from there.
    stop = chosen if chosen in drawn else STEPS_ROW if seen else drawn[0] if drawn else STEPS_ROW
    head, y = _head(seen, across, begin, stop == STEPS_ROW)
    head += [_change(each, across, y) for each in tracks.changes if across.low <= each.time <= across.high]
    body = [_row(tracks, number, across, place * side, side, chosen, stop) for place, number in enumerate(drawn)]
    tail, more = _tail(tracks, len(rows), len(drawn), chosen, width)
    high_body = max(1.0, side * len(drawn))
    bottom = y + high_body if few else y
    head += [place_axis(across, 16, bottom, begin), draw_marks(view, across, 16, bottom) if marks else ""]
    title = f"Timeline: requests {len(tracks.requests)}, steps {len(tracks.steps)}"
    style = svg.tag("style", STYLE)
    if few:
        place = svg.group(*body, transform=f"translate(0,{svg.format_coordinate(y)})")
        foot = svg.group(*tail, transform=f"translate(0,{svg.format_coordinate(y + high_body)})")
        return svg.document(width, y + high_body + more, style, *head, place, foot, title=title)
    scrolled = svg.document(width, high_body, *body, title="Requests")
    return svg.html(
        svg.document(width, y, style, *head, title=title),
        f'<div data-scroll="rows" tabindex="-1" style="max-height:{int(MAX_TALL_ROWS * side)}px;overflow-y:auto">',
        f"{scrolled}</div>",
        svg.document(width, more, *tail, title="What the marks mean"),
    )


def _head(seen: Sequence[TimelineBar], across: Scale, origin: float, stop: bool) -> tuple[list[str], float]:
    """Draw the axis, and for each step its prefill tokens above its decode tokens; return markup and height."""
    bottom = 22 + 2 * ROW_HEIGHT + 14
    parts = [draw_ticks(across, origin, 16, bottom, across.end + RIGHT)]
    for place, (kind, name) in enumerate((("c1", "prefill_tokens"), ("c0", "decode_tokens"))):
        y = 22 + place * (ROW_HEIGHT + 2)
        peaks = [max(step.args[name] for step in bar.slices) for bar in seen]
        most = max(peaks, default=0)
        d = "".join(
            f"M{bar.x:.5g} {y + ROW_HEIGHT:g}v{-ROW_HEIGHT * peak / most:.4g}"
            f"h{max(0.7, bar.wide - 0.4):.4g}V{y + ROW_HEIGHT:g}z"
            for bar, peak in zip(seen, peaks, strict=True)
            if peak
        )
        label = f"{name.replace('_', ' ')}, to {most}"
        parts += [
            svg.tag("path", class_=kind, d=d) if d else "",
            svg.text(LEFT - 8, y + ROW_HEIGHT - 6, label, class_="s", text_anchor="end"),
            svg.line(LEFT, y + ROW_HEIGHT, across.end, y + ROW_HEIGHT, class_="grid"),
        ]
    for place, bar in enumerate(seen):
        live = {"key": f"step:{bar.slices[0].args['step']}", "tabindex": 0 if stop and not place else -1}
        if not place:
            live["data_row"] = ""
        tip = step_tip(bar)
        parts.append(svg.rect(bar.x, 22, max(bar.wide, 0.7), 2 * ROW_HEIGHT + 2, class_="hit step", tip=tip, **live))
        if len(bar.slices) == 1 and bar.wide > 26:
            caption = str(bar.slices[0].args["step"])
            parts.append(svg.text(bar.x + bar.wide / 2, bottom - 1, caption, class_="in faint"))
    parts.append(svg.text(LEFT - 8, bottom - 1, "step", class_="s faint", text_anchor="end"))
    return parts, bottom + 6


def _change(change: SettingsChanged, across: Scale, bottom: float) -> str:
    """Draw a line where a setting changed."""
    x, tip = across(change.time), f"{change.name}: {change.old} → {change.new}"
    return svg.line(x, 16, x, bottom, class_="line chg", tip=tip)


def _visible_requests(tracks: Tracks, across: Scale) -> list[int]:
    """Return the numbers of the requests to draw: all, or if there are many, those active in the visible time."""
    every = range(len(tracks.requests))
    if len(every) <= MAX_TALL_ROWS:
        return list(every)
    found = []
    for number in every:
        phases = tracks.phases(tracks.requests[number])
        if phases and phases[0].end >= across.low and phases[0].begin <= across.high:
            found.append(number)
    return found


def _row(tracks: Tracks, number: int, across: Scale, y: float, side: float, chosen: int, stop: int) -> str:
    track = tracks.requests[number]
    name, phases = row_name(track.row), tracks.phases(track)
    parts = []
    if number % 2:
        parts.append(svg.rect(0, y, across.end + RIGHT, side, class_="odd"))
    parts.append(
        svg.text(
            LEFT - 8,
            y + side - 5,
            truncate_text(name, MAX_NAME_LETTERS),
            text_anchor="end",
            class_="s b" if number == chosen else "s",
            tip=request_tip(name, phases),
            key=f"@{number}",
            tabindex=0 if number == stop else -1,
            data_row="",
        )  # fmt: skip
    )
    return "".join([*parts, draw_request(tracks, track, across, y, side, str(number)),
                    *_decisions(tracks, number, across, y)])  # fmt: skip


def draw_request(tracks: Tracks, track: Track, across: Scale, y: float, side: float, key: str) -> str:
    """Draw a request's bars and tokens in a row at `y`, `side` pixels high; `key` makes the bars' keys unique."""
    name, phases, inner = row_name(track.row), tracks.phases(track), tracks.inner(track)
    gap = min(2.0, side / 6)
    high, parts, labels = side - 2 * gap, [], []
    by_kind = {kind: [each for each in phases[1:] if each.name == kind] for kind in PHASES}
    by_kind |= {kind: [each for each in inner if each.name == kind] for kind in ("preempted", "chunk")}
    inset = min(3.0, side / 8)  # a decode is lower than a chunk
    shapes = {
        "queue": ("qu", y + side / 2 - 2, 4.0), "prefill": ("pf", y + gap, high),
        "decode": ("de", y + gap + inset, high - 2 * inset),
        "preempted": ("sb", y + gap, high), "chunk": ("ch", y + gap, high),
        "round": ("rd", y + gap, high), "wait": ("qu", y + side / 2 - 2, 4.0), "call": ("ca", y + 4, high - 4),
    }  # fmt: skip
    bars = {kind: list(merge_slices(by_kind[kind], across)) for kind in shapes}
    covers = [*bars["preempted"], *bars["chunk"]]  # drawn over the bar of the decode
    for kind, (css, top, tall) in shapes.items():
        for bar in bars[kind]:
            tip = bar_tip(name, bar, track)
            place = f"{css}:{key}:{_nanos(tracks, bar.slices[0].begin)}"
            parts.append(svg.rect(bar.x, top, max(bar.wide, 0.8), tall, class_=css, tip=tip, key=place, tabindex=-1))
            caption, middle = bar_text(bar), bar.x + bar.wide / 2
            room = 6 * len(caption) + 4
            hidden = kind == "decode" and any(
                abs(each.x + each.wide / 2 - middle) < (each.wide + room) / 2 for each in covers
            )
            if bar.wide > room and side > 11 and kind not in ("queue", "prefill", "wait") and not hidden:
                ink = {"decode": "in w", "chunk": "in k"}.get(kind, "in")
                labels.append(svg.text(middle, top + tall / 2 + 3, caption, class_=ink))
            elif kind == "preempted":
                parts.append(svg.tag("path", class_="cross", d=_crosses(bar, top, tall)))
    return "".join([*parts, _tokens(track, across, y + gap + inset, high - 2 * inset), *labels])


def _tokens(track: Track, across: Scale, y: float, tall: float) -> str:
    """Draw the times of tokens if there is space between them."""
    first, last = visible_range(track.token_times, across)
    if last - first < 2:
        return ""
    times = track.token_times[first:last]
    if (across(times[-1]) - across(times[0])) / (last - first - 1) < MIN_TOKEN_SPACING:
        return ""
    return svg.tag("path", class_="tk", d="".join(f"M{across(time):.5g} {y:g}v{tall:g}" for time in times))


def _decisions(tracks: Tracks, number: int, across: Scale, y: float) -> list[str]:
    return [
        svg.tag(
            "path",
            class_="dc",
            d=f"M{x - 3:.5g} {y:g}h6l-3 5z",
            data_tip="\n".join(map(describe_decision, found)),
            data_key=f"why:{number}:{_nanos(tracks, found[0].time)}",
            tabindex=-1,
        )  # fmt: skip
        for x, found in merge_moments(tracks.requests[number].moments, across)
    ]


def _nanos(tracks: Tracks, time: float) -> int:
    """Return a time in nanoseconds, as a key under which a bar keeps the focus after a redraw moves it."""
    return round((time - tracks.begin) * 1e9)


def _crosses(bar: TimelineBar, y: float, tall: float) -> str:
    places = [bar.x + (n + 0.5) * tall for n in range(min(200, int(bar.wide / tall)))]
    return "".join(f"M{x - 2:.5g} {y + 3:g}l4 {tall - 6:g}m0 {6 - tall:g}l-4 {tall - 6:g}" for x in places)


def draw_legend(marks: Sequence[tuple[str, float, str]], left: float, top: float, width: float) -> tuple[str, float]:
    """Draw a legend of `marks` (CSS class, height, caption); return markup and height."""
    parts: list[str] = []
    places = flow([50 + 6 * len(caption) for _, _, caption in marks], left, width)
    for (css, tall, caption), (x, row) in zip(marks, places, strict=True):
        y = top + 18 * row
        if css == "dc":
            parts.append(svg.tag("path", class_="dc", d=f"M{x + 7:g} {y + 3:g}h8l-4 6z"))
        else:
            parts.append(svg.rect(x, y + 6 - tall / 2, 22, tall, class_=css))
        parts.append(svg.text(x + 28, y + 10, caption, class_="s"))
        if css == "sb":
            parts.append(svg.tag("path", class_="cross", d=_crosses(TimelineBar(x, 22, ()), y, tall)))
    return "".join(parts), 18.0 * (places[-1][1] + 1)


def _tail(tracks: Tracks, rows: int, drawn: int, chosen: int, width: float) -> tuple[list[str], float]:
    """Draw the legend, a note on omitted requests, and the chosen request's decisions; return markup and height."""
    agents = any(isinstance(each, AgentTrack) for each in tracks.requests)
    marks = [*(AGENT_MARKS if agents else ()), *REQUEST_MARKS, ("dc", 0.0, "a decision and its reason")]
    legend, high = draw_legend(marks, 8, 10.0, width)
    parts, y = [legend], 18.0 + high
    if rows < len(tracks.requests) or drawn < rows:
        caption = f"{drawn} of {len(tracks.requests)} requests: those active in this window"
        parts.append(svg.text(8, y, caption + (", the first of them" if drawn < rows else ""), class_="s faint"))
        y += 16
    if 0 <= chosen < len(tracks.requests):
        track = tracks.requests[chosen]
        parts.append(svg.text(8, y, f"Decisions on {row_name(track.row)}", class_="s b"))
        backs = [Moment("preempted", each.begin, each.args) for each in tracks.inner(track) if each.name == "preempted"]
        found = sorted([*track.moments, *backs], key=lambda moment: moment.time)
        left_out = f"{len(found) - MAX_DECISIONS} earlier ones, and then:" if len(found) > MAX_DECISIONS else ""
        for line in [*([left_out] if left_out else []), *map(describe_decision, found[-MAX_DECISIONS:])] or ["none"]:
            lines = paragraph(line, 20, y + 15, width - 28, class_="s")
            parts += lines
            y += 15 * len(lines)
        y += 12
    return parts, y
