"""Export events as a Chrome JSON trace: open the file in https://ui.perfetto.dev or chrome://tracing.

One track per engine for its steps, one per request (queue, prefill, decode, with chunks, preemptions and handovers of
pages; an instant per token and decision), and counters for pages and running requests. Format: "Trace Event Format",
Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.trace.recorder import Recorder, row_name
from workbench.trace.slices import Moment, Slice, Track
from workbench.trace.tracks import Tracks

ENGINE, REQUESTS = 1, 2  # process ids of the trace
STEP_TRACK = 1


def chrome_trace(recorder: Recorder) -> dict:
    """Return the trace as a JSON-ready dict; times in microseconds from the first event, to the nanosecond."""
    tracks = Tracks()
    for event in recorder.events:
        tracks.record(event)
    clock = _Clock(tracks.begin if recorder.events else 0.0)
    names = [_name("process", ENGINE, 0, "engine"), _name("process", REQUESTS, 0, "requests")]
    replicas = sorted({step.args.get("replica", 0) for step in tracks.steps} or {0})
    names += [
        _name("thread", ENGINE, STEP_TRACK + each, f"steps of replica {each}" if each else "steps") for each in replicas
    ]
    slices = [each for step in tracks.steps for each in _step(step, clock)]
    for tid, track in enumerate(tracks.requests, start=1):
        names += [_name("thread", REQUESTS, tid, row_name(track.row)), _order(tid)]
        slices += [clock.slice(each, REQUESTS, tid) for each in tracks.phases(track)]
    for tid, track in enumerate(tracks.requests, start=1):
        slices += [clock.slice(each, REQUESTS, tid) for each in tracks.inner(track)]
        slices += [clock.instant(each, tid) for each in (*track.moments, *track.tokens)]
    # Perfetto nests slices with the same start by their order: the longest must come first.
    slices.sort(key=lambda s: (s["ts"], -s.get("dur", 0.0)))
    return {"traceEvents": names + slices, "displayTimeUnit": "ms"}


def read_trace(trace: dict) -> Tracks:
    """Return the tracks of a trace made by `chrome_trace`; times in seconds from its first event."""
    tracks = Tracks()
    for event in trace["traceEvents"]:
        kind, tid = event["ph"], event["tid"]
        if event["name"] == "thread_name" and event["pid"] == REQUESTS:
            tracks.requests.append(Track({"request_id": event["args"]["name"], "sample": 0}))
        if kind not in "Xi":
            continue
        begin = event["ts"] / 1e6
        end = (event["ts"] + event.get("dur", 0.0)) / 1e6
        tracks.begin, tracks.end = min(tracks.begin, begin), max(tracks.end, end)
        if event["pid"] == ENGINE:
            tracks.add_step(Slice(event["name"], begin, end, event["args"]))
            continue
        track = tracks.requests[tid - 1]
        if kind == "X":
            inner = not {"step", "source"}.isdisjoint(event["args"])  # a request may have any name
            (track.inner if inner else track.phases).append(Slice(event["name"], begin, end, event["args"]))
        elif event["name"] == "token":
            track.tokens.append(Moment("token", begin, event["args"]))
            track.token_times.append(begin)
        else:
            track.moments.append(Moment(event["name"], begin, event["args"]))
    return tracks


class _Clock:
    """Convert seconds to nanoseconds after `origin`, as integers, so that a slice ends exactly where its parent does.
    """

    def __init__(self, origin: float) -> None:
        self.origin = origin

    def slice(self, each: Slice, pid: int, tid: int) -> dict:
        first, last = self._nanoseconds(each.begin), self._nanoseconds(each.end)
        times = {"ts": first / 1000, "dur": max(last - first, 0) / 1000}
        return {"name": each.name, "cat": each.name, "ph": "X", "pid": pid, "tid": tid, **times, "args": each.args}

    def instant(self, each: Moment, tid: int) -> dict:
        ts = self._nanoseconds(each.time) / 1000
        place = {"ph": "i", "s": "t", "pid": REQUESTS, "tid": tid, "ts": ts}
        return {"name": each.name, "cat": "event", **place, "args": each.args}

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


def _step(step: Slice, clock: _Clock) -> Iterator[dict]:
    replica = step.args.get("replica", 0)
    where = f" of replica {replica}" if replica else ""
    yield clock.slice(step, ENGINE, STEP_TRACK + replica)
    yield clock.counter(f"pages used{where}", step.end, step.args["pages_used"])
    yield clock.counter(f"requests in step{where}", step.end, step.args["requests"])
