"""Convert a run to slices and instants on tracks, updated by every event, for Perfetto and the timeline.

a request   | queue | prefill: chunk, chunk | decode .... [preempted] [chunk] ..... |      an instant per token,
the engine  | step | step | step | step | step | step | step | step | step | step |      and one per decision

Agents have their own tracks among the tracks of requests (see agent_tracks.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Any

from workbench.trace.agent_events import AgentEvent
from workbench.trace.agent_tracks import AgentTrack, AgentTracks
from workbench.trace.events import (
    Decoded,
    Event,
    Finished,
    HandedOver,
    Moved,
    Preempted,
    Prefilled,
    Routed,
    RoutingOption,
    Scheduled,
    SettingsChanged,
    Stepped,
)
from workbench.trace.recorder import RowNumbers, empty_row, update_row
from workbench.trace.slices import Moment, Slice, Track

STEPS = 0  # the track of the steps; requests have 1, 2, ... in order of arrival
STEP_ARGUMENTS = (
    "step", "requests", "prefill_tokens", "decode_tokens", "pages_used", "pages_idle", "wall_seconds",
    "forward_seconds", "kernel_seconds", "telemetry_seconds", "predicted_flops", "predicted_bytes", "compiles",
    "drafted_tokens", "accepted_tokens", "draft_seconds", "padding_rows",
)  # fmt: skip
ROW_ARGUMENTS = (
    "prompt_tokens", "cut_tokens", "output_tokens", "cached_tokens", "computed_tokens", "written_tokens",
    "shared_pages",
    "finish_reason", "error", "num_preemptions",
)  # fmt: skip


class Tracks:
    """The tracks of a run; `record` takes every event, in order. `begin` and `end` are the first and last
    known times."""

    def __init__(self) -> None:
        self.steps: list[Slice] = []  # in order of their begin; those of several engines may overlap
        self.step_times = array("d")  # begin of each step
        self.longest_step = 0.0  # in seconds
        self._step_ends: dict[int, float] = {}  # end of the last step, by replica
        self.requests: list[Track] = []
        self.begin, self.end = float("inf"), float("-inf")
        self._numbers = RowNumbers()
        self.changes: list[SettingsChanged] = []
        self._by_number: dict[int, Track] = {}  # tracks of requests only
        self._agents = AgentTracks()
        self._chunks: list[tuple[Track, Prefilled, float]] = []  # chunks of the current step, with their earliest start

    def record(self, event: Event) -> None:
        self.begin, self.end = min(self.begin, event.time), max(self.end, event.time)
        if isinstance(event, Stepped):
            self._step(event)
        elif isinstance(event, SettingsChanged):
            self.changes.append(event)
        elif isinstance(event, AgentEvent):
            self.requests += self._agents.record(event)
            return
        number = self._numbers.row_of(event)
        if number is None:
            return
        if number not in self._by_number:
            self._by_number[number] = Track(empty_row(event.request_id, event.sample))
            self.requests.append(self._by_number[number])
        track = self._by_number[number]
        update_row(track.row, event)
        if (arrival := track.row["arrival"]) is not None:
            self.begin, self.end = min(self.begin, arrival), max(self.end, arrival)
        self._update_track(track, event)
        track.last = event.time

    def drop_before(self, time: float) -> None:
        """Drop requests, steps and setting changes that ended before `time`, and set `begin` to `time`."""
        ended = {number for number, each in self._by_number.items() if each.phases and each.phases[0].end < time}
        gone = {id(self._by_number.pop(number)) for number in ended}
        self.requests = [each for each in self.requests if id(each) not in gone]
        self.steps = [each for each in self.steps if each.end >= time]
        self.step_times = array("d", (each.begin for each in self.steps))
        self.changes = [each for each in self.changes if each.time >= time]
        self.begin = max(self.begin, time)

    def add_step(self, step: Slice) -> None:
        """Add a step where it belongs by its begin: an engine's long step ends after later steps of other engines."""
        place = bisect_right(self.step_times, step.begin)
        self.steps.insert(place, step)
        self.step_times.insert(place, step.begin)
        self.longest_step = max(self.longest_step, step.end - step.begin)

    def phases(self, track: Track) -> list[Slice]:
        """Return the main slices of a track so far: those of a request (queue, prefill and decode) or of an agent's run
        (rounds, waits and calls), within one slice for the whole.
        """
        if isinstance(track, AgentTrack):
            return track.slices_until(self.end)
        return track.phases or _phases(track.row, self.end)

    def inner(self, track: Track) -> list[Slice]:
        """Return the track's chunks, handovers and preemptions, including a current preemption."""
        return track.inner if track.preempted is None else [*track.inner, _preempted_slice(track.preempted, self.end)]

    def _step(self, event: Stepped) -> None:
        # Steps of one engine never overlap; rounding of the difference could say otherwise.
        start = max(event.time - event.wall_seconds, self._step_ends.get(event.replica, float("-inf")))
        self.begin = min(self.begin, event.time - event.wall_seconds)
        args = {name: getattr(event, name) for name in STEP_ARGUMENTS}
        if event.replica:
            args["replica"] = event.replica
        self._step_ends[event.replica] = max(start, event.time)
        self.add_step(Slice(event.phase or "step", start, self._step_ends[event.replica], args))
        for track, chunk, since in self._chunks:
            if chunk.step == event.step:
                details = {"step": chunk.step, "tokens": chunk.tokens, "computed": chunk.computed}
                track.inner.append(Slice("chunk", min(max(start, since), chunk.time), chunk.time, details))
        self._chunks.clear()

    def _update_track(self, track: Track, event: Event) -> None:
        admitted = isinstance(event, Scheduled) and event.action == "admitted"
        if track.preempted is not None and (admitted or isinstance(event, (Prefilled, Decoded, Finished))):
            track.inner.append(_preempted_slice(track.preempted, event.time))
            track.preempted = None
        match event:
            case Preempted():
                if track.preempted is not None:
                    track.inner.append(_preempted_slice(track.preempted, event.time))
                track.preempted = event
            case Prefilled():
                self._chunks.append((track, event, max(track.last, track.row["arrival"] or track.last)))
            case Decoded():
                details = {name: getattr(event, name) for name in ("index", "token_id", "text", "step")}
                track.tokens.append(Moment("token", event.time, details))
                track.token_times.append(event.time)
            case Scheduled():
                details = {"step": event.step, "reason": event.reason}
                track.moments.append(Moment(event.action, event.time, details))
            case Routed():
                details = {"replica": event.replica, "reason": event.reason}
                details |= {f"replica {each.replica}": option_words(each) for each in event.options}
                track.moments.append(Moment("routed", event.time, details))
            case Moved():
                names = ("source", "replica", "generated_tokens", "reason")
                track.moments.append(Moment("moved", event.time, {name: getattr(event, name) for name in names}))
            case HandedOver():
                names = ("source", "replica", "pages", "bytes")
                details = {name: getattr(event, name) for name in names}
                offered = min(max(event.time - event.seconds, track.last), event.time)
                track.inner.append(Slice("handover", offered, event.time, details))
            case Finished():
                track.phases = _phases(track.row, event.time)


def option_words(option: RoutingOption) -> str:
    """Return a text with what a router knew of one replica: its samples, pending tokens, and cached tokens of the
    prompt.
    """
    return (
        f"{option.samples} samples, {option.pending_prompt_tokens} tokens pending, "
        f"{option.cached_tokens} of the prompt cached"
    )


def _preempted_slice(event: Preempted, end: float) -> Slice:
    return Slice("preempted", event.time, end, {"step": event.step, "reason": event.reason})


def _phases(row: dict[str, Any], end: float) -> list[Slice]:
    finished = end if row["finished"] is None else row["finished"]
    began = finished if row["arrival"] is None else row["arrival"]
    marks = [began, row["first_scheduled"], row["first_token"], finished]
    name = f"{row['request_id']}#{row['sample']}" if row["sample"] else row["request_id"]
    out = [Slice(name, began, finished, {name: row[name] for name in ROW_ARGUMENTS})]
    for phase, start, stop in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
        if start is not None:
            out.append(Slice(phase, start, finished if stop is None else stop, {}))
    return out
