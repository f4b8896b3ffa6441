"""Convert agents' runs to slices on tracks, shown with the tracks of their requests.

an agent        | round 0 | wait: call ....... | round 1 | wait: call .. | round 2 |
  its call 1              |       call .. |                  a track for each further call at once
a request       | queue | prefill | decode |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workbench.trace.agent_events import (
    AgentEvent,
    AgentFinished,
    CallFinished,
    CallStarted,
    RoundFinished,
    RoundStarted,
)
from workbench.trace.slices import Slice, Track

MAX_RESULT = 200  # characters of a result in a slice
ROUND_ARGUMENTS = (
    "request", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "thinking_tokens",
    "finish_reason",
)  # fmt: skip


@dataclass
class AgentTrack(Track):
    """The track of an agent's run. If a round has several tool calls at once, each call after the first has a track of
    its own.

    `open` are unfinished slices, outermost first: name, begin, arguments.
    """

    begin: float = 0.0
    finished: float | None = None
    slices: list[Slice] = field(default_factory=list)
    open: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)

    def slices_until(self, now: float) -> list[Slice]:
        """Return the run so far as one slice, followed by the slices within it: rounds, waits and calls."""
        end = max(now, self.begin) if self.finished is None else self.finished
        whole = Slice(str(self.row["request_id"]), self.begin, end, self.arguments)
        going = [Slice(name, begin, max(begin, end), arguments) for name, begin, arguments in self.open]
        return [whole, *self.slices, *going]

    def start(self, name: str, time: float, arguments: dict[str, Any]) -> None:
        self.open.append((name, max(time, self.begin), arguments))

    def end(self, name: str, time: float, arguments: dict[str, Any]) -> None:
        """End the slice of this name, and all unfinished slices within it."""
        while any(each[0] == name for each in self.open):
            found, begin, known = self.open.pop()
            mine = arguments if found == name else {}
            self.slices.append(Slice(found, begin, max(begin, time), {**known, **mine}))
            if found == name:
                return


class AgentTracks:
    """The tracks of all agents; `record` takes an event and returns the tracks that begin with it."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[str, int], AgentTrack] = {}

    def record(self, event: AgentEvent) -> list[Track]:
        new: list[Track] = []
        place = event.index if isinstance(event, CallStarted | CallFinished) else 0
        track = self._track(event, 0, new)
        match event:
            case RoundStarted():
                track.end("wait", event.time, {})
                track.start("round", event.time, {"round": event.round, "request": event.request})
            case RoundFinished():
                track.end("round", event.time, {name: getattr(event, name) for name in ROUND_ARGUMENTS})
            case CallStarted():
                if not any(each[0] == "wait" for each in track.open):
                    track.start("wait", event.time, {"round": event.round})
                mine = self._track(event, place, new)
                details = {"tool": event.name, "arguments": event.arguments, "round": event.round}
                mine.start("call", event.time, details)
                mine.finished = None
            case CallFinished():
                mine = self._track(event, place, new)
                details = {"result": event.result[:MAX_RESULT], **({"error": event.error} if event.error else {})}
                mine.end("call", event.time, details)
                if place:
                    mine.finished = event.time
            case AgentFinished():
                for (agent, _), each in self._tracks.items():
                    if agent == event.agent and (each is track or each.open):
                        for name in ("call", "round", "wait"):
                            each.end(name, event.time, {})
                        each.finished = max(event.time, each.begin)
                track.arguments = {"finish_reason": event.stop_reason, "error": event.error or None}
        return new

    def _track(self, event: AgentEvent, place: int, new: list[Track]) -> AgentTrack:
        key = event.agent, place
        if key not in self._tracks:
            name = event.agent if not place else f"{event.agent}: call {place}"
            row = {"request_id": name, "sample": 0, "num_preemptions": 0, "arrival": event.time}
            self._tracks[key] = AgentTrack(row, begin=event.time, arguments={"finish_reason": None})
            new.append(self._tracks[key])
        return self._tracks[key]
