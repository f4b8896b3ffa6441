"""Prepare a server's snapshot for a picture: requests as phases over time, tokens with their delays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from workbench.errors import WorkbenchError
from workbench.serve.watch.serving_log import ServingLog
from workbench.serve.watch.snapshot import ACTIVE, RequestStatus, RequestTrace, ServerSnapshot
from workbench.units import format_seconds

MIN_SECONDS = 0.05  # least length of the time axis
SPANS = {"10 s": 10.0, "60 s": 60.0, "all": float("inf")}  # length of the time axis in seconds


class RequestPhase(NamedTuple):
    """One phase of a request (waiting, prefill, decode or preempted), in seconds on the snapshot's clock."""

    name: str
    begin: float
    end: float


class TokenDelay(NamedTuple):
    """One output token, and the seconds since the previous token, or since the arrival for the first token."""

    index: int
    text: str
    token_id: int
    time: float
    seconds: float
    step: int


@dataclass(frozen=True)
class SpanAxis:
    """The visible range of time, in seconds on the snapshot's clock."""

    low: float
    high: float

    @classmethod
    def over(cls, snapshot: ServerSnapshot, seconds: float) -> SpanAxis:
        """Return an axis of at most `seconds` up to now, or up to the last request's end if no request is active."""
        requests = snapshot.recent
        busy = any(each.state in ACTIVE for each in requests)
        ends = [each.ended for each in requests if each.ended is not None]
        high = snapshot.time if busy or not ends else max(ends)
        low = max(min((each.arrival for each in requests), default=high - 1.0), high - seconds)
        return cls(low, max(high, low + MIN_SECONDS))

    def shows(self, request: RequestStatus) -> bool:
        return request.arrival <= self.high and (request.ended is None or request.ended >= self.low)


def phases_of(request: RequestStatus, now: float) -> list[RequestPhase]:
    """Return the phases of a request in order, followed by its preemptions, which overlap the phases.

    Waiting, prefill and decode cover the time from the arrival to the end, or to `now`.
    """
    end = now if request.ended is None else request.ended
    marks = [request.arrival, request.first_scheduled, request.first_token, end]
    phases = []
    for name, begin, stop in zip(ACTIVE, marks, marks[1:], strict=False):
        if begin is not None:
            phases.append(RequestPhase(name, begin, end if stop is None else stop))
    phases += [RequestPhase("preempted", begin, end if stop is None else stop) for begin, stop in request.preempted]
    return phases


def visible_requests(snapshot: ServerSnapshot, axis: SpanAxis) -> list[RequestStatus]:
    """Return the visible requests, the latest first."""
    return sorted(filter(axis.shows, snapshot.recent), key=lambda each: -each.arrival)


def token_delays(request: RequestStatus, trace: RequestTrace) -> list[TokenDelay]:
    """Return the tokens of a trace with the delay of each."""
    first = request.output_tokens - len(trace.tokens)
    before = request.arrival
    found = []
    for number, token in enumerate(trace.tokens):
        # If earlier tokens were dropped, the delay of the first kept token is unknown.
        seconds = token.time - before if number or first <= 0 else 0.0
        found.append(TokenDelay(first + number, token.text, token.token_id, token.time, seconds, token.step))
        before = token.time
    return found


def request_tip(request: RequestStatus, now: float) -> str:
    """Return a tooltip of a few lines: a request's state, tokens and latencies."""
    end = now if request.ended is None else request.ended
    lines = [f"{request.id}: {request.state}, {format_seconds(max(0.0, end - request.arrival))}"]
    if request.tenant:
        lines.append(f"of {request.tenant}")
    cached = f", {request.cached_tokens:,} of them cached" if request.cached_tokens else ""
    lines.append(f"{request.prompt_tokens:,} prompt tokens{cached}, {request.output_tokens:,} output tokens")
    if request.ttft is not None:
        tpot = f", TPOT {format_seconds(request.tpot)}" if request.tpot is not None else ""
        lines.append(f"TTFT {format_seconds(request.ttft)}{tpot}")
    if request.preempted:
        lines.append(f"{len(request.preempted)} preemptions")
    if request.reason:
        lines.append(f"ended: {request.reason}")
    return "\n".join(lines)


def summarize(snapshot: ServerSnapshot) -> str:
    """Return a server's snapshot in one sentence: the picture's title for screen readers."""
    counts = ", ".join(f"{count} {state}" for state, count in snapshot.requests.items() if count) or "no request yet"
    text = f"Server {snapshot.model}: {counts}; {snapshot.output_tokens_per_second:.1f} output tokens a second"
    if snapshot.ttft.p50 is not None:
        text += f"; TTFT {format_seconds(snapshot.ttft.p50)} at the median"
    if snapshot.pages.total:
        text += f"; {snapshot.pages.used} of {snapshot.pages.total} pages in use"
    return text


@dataclass(frozen=True)
class SnapshotSource:
    """The source of a view's snapshots and traces; `watch` subscribes to new snapshots, and is None for a fixed
    snapshot."""

    read: Callable[[], ServerSnapshot]
    trace: Callable[[str], RequestTrace | None]
    address: str = ""
    watch: Callable[[Callable[[], None]], Callable[[], None]] | None = None


def open_source(source: Any) -> SnapshotSource:
    """Return a source for a server, a snapshot, or the file of a saved snapshot.

    Raises:
        WorkbenchError: `source` is something else.
    """
    log = getattr(source, "log", None)
    if isinstance(log, ServingLog):
        return SnapshotSource(log.snapshot, log.trace, str(getattr(source, "url", "")), log.watch)
    if hasattr(source, "__fspath__") or isinstance(source, str):
        source = ServerSnapshot.load(source)
    if isinstance(source, ServerSnapshot):
        return SnapshotSource(lambda: source, source.traces.get)
    raise WorkbenchError(
        "ServerView: give a server (`workbench.serve(runner)`), a snapshot, or the file that one was saved to, "
        f"not {type(source).__name__}"
    )


def longest(delays: Sequence[TokenDelay]) -> float:
    """Return the longest time between two tokens, in seconds; the first token's delay does not count."""
    return max((each.seconds for each in delays if each.index), default=0.0)


def with_traces(snapshot: ServerSnapshot, source: SnapshotSource) -> ServerSnapshot:
    """Return a copy of a snapshot that contains the traces of its requests, for saving."""
    traces = {each.id: trace for each in snapshot.recent if (trace := source.trace(each.id)) is not None}
    return replace(snapshot, traces=traces)
