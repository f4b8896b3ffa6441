"""Summarize the events between two times of a log, and compute percentiles over a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.runs.metrics import percentile
from workbench.widgets.live_bench.log import BenchLog, Floats, TimedValues

PERCENTILES = (50, 95, 99)
WINDOW_SECONDS = 5.0  # window of percentiles and rates


@dataclass(frozen=True)
class WindowStatistics:
    """Counts of events from `begin` to `end`, and latencies in seconds; None without values.

    `started` counts first admissions, `ended` requests that were not refused, cancelled or failed. A step, a token and
    a latency count at the time of their end. `ttft` and `itl` are percentiles, in the order of `PERCENTILES`. `dropped`
    is the requested time before `begin`, in seconds, that the log no longer keeps.
    """

    begin: float
    end: float
    arrived: int
    refused: int
    started: int
    ended: int
    cancelled: int
    preemptions: int
    output_tokens: int
    prefill_tokens: int
    steps: int
    mean_batch: float | None
    mean_queue: float | None
    max_queue: int | None
    mean_pages: float | None
    max_pages: int | None
    ttft: tuple[float | None, ...]
    itl: tuple[float | None, ...]
    dropped: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def per_second(self, count: float) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0

    def rows(self) -> list[tuple[str, float | None, str]]:
        """Return (name, value, unit) of every figure."""
        counts = ("arrived", "refused", "started", "ended", "cancelled")
        latencies = {"TTFT": self.ttft, "inter-token latency": self.itl}
        tails = [
            (f"{name} p{q}", value, "s")
            for name, cuts in latencies.items()
            for q, value in zip(PERCENTILES, cuts, strict=True)
        ]
        return [
            ("duration", self.seconds, "s"),
            *((f"requests {name}", getattr(self, name), "requests") for name in counts),
            ("preemptions", self.preemptions, "preemptions"),
            ("output tokens", self.output_tokens, "tokens"),
            ("output tokens per second", self.per_second(self.output_tokens), "tokens/s"),
            ("prefill tokens per second", self.per_second(self.prefill_tokens), "tokens/s"),
            ("steps", self.steps, "steps"),
            ("mean batch", self.mean_batch, "sequences"),
            ("mean queue", self.mean_queue, "requests"),
            ("longest queue", self.max_queue, "requests"),
            ("mean pages in use", self.mean_pages, "pages"),
            ("most pages in use", self.max_pages, "pages"),
            *tails,
        ]

    def csv(self) -> str:
        """Return the rows as CSV, in full precision."""
        lines = [f"{name},{'' if value is None else repr(value)},{unit}" for name, value, unit in self.rows()]
        return "\n".join(["figure,value,unit", *lines, ""])


def kept_statistics(log: BenchLog, begin: float, end: float) -> WindowStatistics:
    """Return the statistics of begin <= time < end, as far as the log still keeps that time; the dropped part is noted
    in `dropped`."""
    first = min(max(begin, log.begin), max(begin, end)) if log.has_dropped else begin
    return replace(window_statistics(log, first, end), dropped=first - begin)


def window_statistics(log: BenchLog, begin: float, end: float) -> WindowStatistics:
    """Return the statistics of a log's events within begin <= time < end."""
    steps = log.steps_between(begin, end)

    def mean(name: str) -> float | None:
        return sum(getattr(step, name) for step in steps) / len(steps) if steps else None

    def cuts(series: TimedValues) -> tuple[float | None, ...]:
        values = series.between(begin, end)[1].tolist()
        return tuple(percentile(values, q) for q in PERCENTILES)

    counted = (log.arrived, log.refused, log.started, log.ended, log.cancelled, log.preempted, log.tokens)
    return WindowStatistics(
        begin,
        end,
        *(each.count(begin, end) for each in counted),
        prefill_tokens=sum(step.prefill_tokens for step in steps),
        steps=len(steps),
        mean_batch=mean("running"),
        mean_queue=mean("waiting"),
        max_queue=max((step.waiting for step in steps), default=None),
        mean_pages=mean("pages_used"),
        max_pages=max((step.pages_used for step in steps), default=None),
        ttft=cuts(log.ttft),
        itl=cuts(log.itl),
    )


def sliding_percentiles(series: TimedValues, moments: Sequence[float], seconds: float = WINDOW_SECONDS) -> Floats:
    """Return percentiles [percentile, moment] of the values within `seconds` before each moment; NaN without values."""
    out = np.full((len(PERCENTILES), len(moments)), np.nan)
    if not len(moments):
        return out
    times, values = series.between(min(moments) - seconds, np.nextafter(max(moments), np.inf))
    first = np.searchsorted(times, np.asarray(moments) - seconds, "right")
    last = np.searchsorted(times, moments, "right")
    for place, (low, high) in enumerate(zip(first, last, strict=True)):
        if high > low:
            out[:, place] = np.percentile(values[low:high], PERCENTILES)
    return out


def overload(log: BenchLog, max_waiting: int, seconds: float = WINDOW_SECONDS) -> str:
    """Return a message if the runner was overloaded during the last `seconds`, else an empty text."""
    last = window_statistics(log, log.end - seconds, np.nextafter(log.end, np.inf))
    if last.refused:
        return (
            f"Overload: {last.refused} of the {last.arrived} requests of the last {seconds:g} s were refused, because "
            f"{max_waiting} waited already; {last.per_second(last.ended):.1f} a second are served."
        )
    steps = log.steps_between(log.end - seconds, np.nextafter(log.end, np.inf))
    if steps and log.num_waiting >= steps[0].waiting + 4 and last.arrived > last.ended:
        return (
            f"The queue grows: {last.per_second(last.arrived):.1f} requests a second arrive, "
            f"{last.per_second(last.ended):.1f} end; from {max_waiting} waiting on, more are refused."
        )
    return ""
