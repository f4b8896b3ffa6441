"""A recorder's events as a Chrome JSON trace: open the file in https://ui.perfetto.dev or chrome://tracing.

One track of steps, one track a request (queue, prefill, decode, set-backs, an instant a token), counters for
pages and running requests. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from workbench.trace.events import Decoded, Finished, Planned, Prefilled, SetBack, Stepped
from workbench.trace.recorder import Recorder, row_name

ENGINE, REQUESTS = 1, 2  # process ids of the trace
STEP_TRACK = 1
STEP_ARGUMENTS = (
    "step", "requests", "prefill_tokens", "decode_tokens", "pages_used", "pages_idle", "wall_seconds",
    "forward_seconds", "kernel_seconds", "note_seconds", "predicted_flops", "predicted_bytes", "compiles",
    "drafted_tokens", "accepted_tokens", "draft_seconds", "padding_rows",
)  # fmt: skip


def chrome_trace(recorder: Recorder) -> dict:
    """The trace as a JSON-ready dict; times in microseconds from the first event, to the nanosecond."""
    rows, events = recorder.requests(), recorder.events
    arrivals = [row["arrival"] for row in rows if row["arrival"] is not None]
    starts = [e.time - e.wall_seconds for e in events if isinstance(e, Stepped)]
    clock = _Clock(min([e.time for e in events] + arrivals + starts, default=0.0))
    end = max([e.time for e in events] + arrivals, default=0.0)

    names = [_name("process", ENGINE, 0, "engine"), _name("process", REQUESTS, 0, "requests")]
    names += [_name("thread", ENGINE, STEP_TRACK, "steps")]
    slices = _steps(recorder, clock)
    for track, row in enumerate(rows, start=1):
        names += [_name("thread", REQUESTS, track, row_name(row)), _order(track)]
        slices += _phases(row, track, clock, end)
    slices += _happenings(recorder, clock, end)
    # Perfetto nests slices that begin together by their order: the longest first.
    slices.sort(key=lambda s: (s["ts"], -s.get("dur", 0.0)))
    return {"traceEvents": names + slices, "displayTimeUnit": "ms"}


class _Clock:
    """Seconds to whole nanoseconds after `origin`; whole, so that a slice ends where its parent does."""

    def __init__(self, origin: float) -> None:
        self.origin = origin

    def slice(self, name: str, pid: int, tid: int, start: float, end: float, args: dict) -> dict:
        first, last = self._nanoseconds(start), self._nanoseconds(end)
        times = {"ts": first / 1000, "dur": max(last - first, 0) / 1000}
        return {"name": name, "cat": name, "ph": "X", "pid": pid, "tid": tid, **times, "args": args}

    def instant(self, name: str, tid: int, time: float, args: dict) -> dict:
        ts = self._nanoseconds(time) / 1000
        place = {"ph": "i", "s": "t", "pid": REQUESTS, "tid": tid, "ts": ts}
        return {"name": name, "cat": "event", **place, "args": args}

    def counter(self, name: str, time: float, value: int) -> dict:
        ts = self._nanoseconds(time) / 1000
        return {"name": name, "ph": "C", "pid": ENGINE, "tid": 0, "ts": ts, "args": {name: value}}

    def _nanoseconds(self, time: float) -> int:
        return round((time - self.origin) * 1e9)


def _name(kind: str, pid: int, tid: int, name: str) -> dict:
    return {"name": f"{kind}_name", "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _order(track: int) -> dict:
    args = {"sort_index": track}
    return {"name": "thread_sort_index", "ph": "M", "pid": REQUESTS, "tid": track, "ts": 0, "args": args}


def _steps(recorder: Recorder, clock: _Clock) -> list[dict]:
    out, previous = [], float("-inf")
    for step in recorder.steps():
        # One step follows another, whatever the rounding of a difference says.
        start = max(step["time"] - step["wall_seconds"], previous)
        args = {name: step[name] for name in STEP_ARGUMENTS}
        out.append(clock.slice(step["phase"] or "step", ENGINE, STEP_TRACK, start, step["time"], args))
        out.append(clock.counter("pages used", step["time"], step["pages_used"]))
        out.append(clock.counter("requests in step", step["time"], step["requests"]))
        previous = max(previous, step["time"])
    return out


def _phases(row: dict, track: int, clock: _Clock, end: float) -> list[dict]:
    """The request as one slice, and in it queue, prefill and decode as far as it came."""
    finished = end if row["finished"] is None else row["finished"]
    began = finished if row["arrival"] is None else row["arrival"]
    marks = [began, row["first_scheduled"], row["first_token"], finished]
    known = (
        "prompt_tokens", "cut_tokens", "output_tokens", "cached_tokens", "computed_tokens", "shared_pages",
        "finish_reason", "error", "set_backs",
    )  # fmt: skip
    args = {name: row[name] for name in known}
    out = [clock.slice(row_name(row), REQUESTS, track, began, finished, args)]
    for name, start, stop in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
        if start is not None:
            out.append(clock.slice(name, REQUESTS, track, start, finished if stop is None else stop, {}))
    return out


def _happenings(recorder: Recorder, clock: _Clock, end: float) -> list[dict]:
    """Tokens and decisions as instants; a set-back as the slice until the request computes again."""
    out: list[dict] = []
    away: dict[int, SetBack] = {}

    def back(track: int, time: float) -> None:
        if event := away.pop(track, None):
            args = {"step": event.step, "reason": event.reason}
            out.append(clock.slice("set back", REQUESTS, track, event.time, time, args))

    for number, event in recorder.by_request():
        track = number + 1
        if isinstance(event, (Prefilled, Decoded, Finished)):
            back(track, event.time)
        match event:
            case SetBack():
                away[track] = event
            case Decoded():
                args = {name: getattr(event, name) for name in ("index", "token_id", "text", "step")}
                out.append(clock.instant("token", track, event.time, args))
            case Planned() if event.action != "waiting":  # that one comes anew each step
                args = {"step": event.step, "reason": event.reason}
                out.append(clock.instant(event.action, track, event.time, args))
    for track in list(away):
        back(track, end)
    return out
