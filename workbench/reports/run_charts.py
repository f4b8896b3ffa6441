"""Charts of a run, drawn from raw timestamps: request timelines, batch sizes, pages in use, latency distributions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.reports.charts import ChartBar, Series, bar_chart, line_chart
from workbench.runs.metrics import per_request
from workbench.runs.record import Record
from workbench.svg import Axis
from workbench.trace.recorder import row_name

MAX_REQUESTS_DRAWN = 48  # rows of a chart
PHASES = ("queue", "prefill", "decode")
LATENCIES = {"ttft_s": "TTFT", "itl_s": "ITL", "e2el_s": "E2EL"}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ReportChart:
    """A chart as SVG.

    One that is `stored` came from a file and is shown as an image; others go into the page as they are.
    """

    caption: str
    svg: str
    stored: bool = False


def run_charts(record: Record) -> list[ReportChart]:
    """Return the charts stored with the run, then those drawn from its tables."""
    found = [
        ReportChart(name, record.read_text(name), True) for name in sorted(record.manifest) if name.endswith(".svg")
    ]
    tables = {"requests.parquet", "steps.parquet", "tokens.parquet"}
    if tables <= record.manifest.keys():
        try:
            requests, steps, tokens = (record.read_table(name).to_pylist() for name in sorted(tables, key=_order))
            found += draw_charts(requests, steps, tokens)
        except KeyError:  # a table of the same name with other columns: a comparison's
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
        yield ReportChart(caption, bar_chart(request_bars, Axis("seconds from the first arrival"), PHASES, caption))
    if len(steps) > 1:
        seconds = Axis("seconds from the first arrival")
        caption = "Sequences in each step, and tokens"
        columns = {"sequences": "requests", "prefill tokens": "prefill_tokens", "decode tokens": "decode_tokens"}
        series = [Series(name, _over_steps(steps, key, origin)) for name, key in columns.items()]
        yield ReportChart(caption, line_chart(series, seconds, Axis("in one step"), caption))
        caption = "Pages of the cache in use"
        columns = {"in use": "pages_used", "kept for later requests": "pages_idle"}
        series = [Series(name, _over_steps(steps, key, origin)) for name, key in columns.items()]
        yield ReportChart(caption, line_chart(series, seconds, Axis("pages"), caption))
    figures = per_request(requests, tokens)
    shares = [Series(name, _cumulative_distribution(figures, key)) for key, name in LATENCIES.items()]
    if any(len(each.points) > 2 for each in shares):
        caption = "Share of requests (of tokens: ITL) that took at most so long"
        axes = Axis("milliseconds", log=True), Axis("share")
        yield ReportChart(caption, line_chart([each for each in shares if each.points], *axes, caption))


def _over_steps(steps: Rows, key: str, origin: float) -> tuple[tuple[float, float], ...]:
    """Return a figure of each step as a line, constant for as long as the step lasted."""
    ends = ((step["time"] - origin, step) for step in steps)
    return tuple(point for end, step in ends for point in ((end - step["wall_seconds"], step[key]), (end, step[key])))


def _request_bars(requests: Rows, origin: float) -> list[tuple[str, list[ChartBar]]]:
    found = []
    for row in requests[:MAX_REQUESTS_DRAWN]:
        marks = [row["arrival"], row["first_scheduled"], row["first_token"], row["finished"]]
        pairs = zip(marks, marks[1:], strict=False)
        each = [
            ChartBar(a - origin, b - origin, i) for i, (a, b) in enumerate(pairs) if a is not None and b is not None
        ]
        found.append((row_name(dict(row)), each))
    return found


def _cumulative_distribution(figures: Rows, key: str) -> tuple[tuple[float, float], ...]:
    """Return the empirical cumulative distribution, in milliseconds, as a staircase."""
    values: list[float] = []
    for row in figures:
        value = row[key]
        values += value if isinstance(value, list) else [] if value is None else [value]
    ordered = sorted(1e3 * value for value in values if value > 0)
    stairs = []
    for rank, value in enumerate(ordered):
        stairs += [(value, rank / len(ordered)), (value, (rank + 1) / len(ordered))]
    return tuple(stairs)
