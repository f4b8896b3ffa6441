"""Draw the charts of a run from its raw timestamps: request timelines, batch sizes, pages in use, latency
distributions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from workbench.figures.bars import SpanBar, spans
from workbench.figures.figure import Figure
from workbench.figures.lines import Series, lines
from workbench.runs.metrics import per_request
from workbench.runs.record import Record
from workbench.svg import Axis
from workbench.trace.recorder import row_name

MAX_REQUESTS_DRAWN = 48  # rows of a request timeline
PHASES = ("queue", "prefill", "decode")
LATENCIES = {"ttft_s": "TTFT", "itl_s": "ITL", "e2el_s": "E2EL"}
STEP_CHARTS = (  # caption, axis, and columns of a step by name
    (
        "Sequences in each step, and tokens",
        "in one step",
        {"sequences": "requests", "prefill tokens": "prefill_tokens", "decode tokens": "decode_tokens"},
    ),
    ("Pages of the cache in use", "pages", {"in use": "pages_used", "kept for later requests": "pages_idle"}),
)
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ReportChart:
    """A chart as SVG, with its caption.

    A chart that is `stored` came from a file and is shown as an image; others are written into the page itself.
    """

    caption: str
    svg: str
    stored: bool = False

    @classmethod
    def of(cls, caption: str, figure: Figure) -> ReportChart:
        """Convert a figure to a chart in the colours of the page."""
        return cls(caption, figure.svg(in_page=True))


def run_charts(record: Record) -> list[ReportChart]:
    """Return the charts stored with the run, followed by the charts drawn from its tables."""
    found = [
        ReportChart(name, record.read_text(name), True) for name in sorted(record.manifest) if name.endswith(".svg")
    ]
    tables = {"requests.parquet", "steps.parquet", "tokens.parquet"}
    if tables <= record.manifest.keys():
        try:
            requests, steps, tokens = (record.read_table(name).to_pylist() for name in sorted(tables, key=_order))
            found += draw_charts(requests, steps, tokens)
        except KeyError:  # a comparison's table of the same name, with other columns
            return found
    return found


def _order(name: str) -> int:
    return ("requests.parquet", "steps.parquet", "tokens.parquet").index(name)


def draw_charts(requests: Rows, steps: Rows, tokens: Rows) -> Iterator[ReportChart]:
    starts = [row["arrival"] for row in requests if row["arrival"] is not None]
    starts += [step["time"] - step["wall_seconds"] for step in steps]
    if not starts:
        return
    origin = min(starts)
    if request_bars := _request_bars(requests, origin):
        left_out = f"; the first {MAX_REQUESTS_DRAWN} of {len(requests)}" if len(requests) > MAX_REQUESTS_DRAWN else ""
        caption = f"When each request waited, was in prefill, and decoded{left_out}"
        yield ReportChart.of(caption, spans(request_bars, Axis("seconds from the first arrival")))
    if len(steps) > 1:
        seconds = Axis("seconds from the first arrival")
        for caption, axis, columns in STEP_CHARTS:
            series = [Series(name, _over_steps(steps, key, origin), marked=False) for name, key in columns.items()]
            yield ReportChart.of(caption, lines(series, seconds, Axis(axis), zero=True))
    figures = per_request(requests, tokens)
    shares = [Series(name, _cumulative_distribution(figures, key), marked=False) for key, name in LATENCIES.items()]
    if any(len(each.points) > 2 for each in shares):
        caption = "Share of requests (ITL: of tokens) with at most this latency"
        axes = Axis("milliseconds", log=True), Axis("share", percent=True)
        yield ReportChart.of(caption, lines([each for each in shares if each.points], *axes, zero=True))


def _over_steps(steps: Rows, key: str, origin: float) -> tuple[tuple[float, float], ...]:
    """Return (seconds, value) points of a number of each step, constant for the duration of the step."""
    ends = ((step["time"] - origin, step) for step in steps)
    return tuple(point for end, step in ends for point in ((end - step["wall_seconds"], step[key]), (end, step[key])))


def _request_bars(requests: Rows, origin: float) -> list[SpanBar]:
    found = []
    for row in requests[:MAX_REQUESTS_DRAWN]:
        marks = [row["arrival"], row["first_scheduled"], row["first_token"], row["finished"]]
        for phase, (begin, end) in zip(PHASES, pairwise(marks), strict=True):
            if begin is not None and end is not None:
                found.append(SpanBar(row_name(dict(row)), begin - origin, end - origin, phase))
    return found


def _cumulative_distribution(figures: Rows, key: str) -> tuple[tuple[float, float], ...]:
    """Return the empirical cumulative distribution as a staircase of (milliseconds, fraction) points."""
    values: list[float] = []
    for row in figures:
        value = row[key]
        values += value if isinstance(value, list) else [] if value is None else [value]
    ordered = sorted(1e3 * value for value in values if value > 0)
    stairs = []
    for rank, value in enumerate(ordered):
        stairs += [(value, rank / len(ordered)), (value, (rank + 1) / len(ordered))]
    return tuple(stairs)
