"""Define the contents of a track: slices with a start and an end, and instants."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workbench.trace.events import Preempted


class Slice(NamedTuple):
    """An interval from `begin` to `end`, in seconds on the runner's clock."""

    name: str
    begin: float
    end: float
    args: dict[str, Any]


class Moment(NamedTuple):
    name: str
    time: float
    args: dict[str, Any]


@dataclass
class Track:
    """The track of one request: its `phases` (once it has finished), its `inner` slices (chunks, preemptions,
    handovers), its `moments` (decisions), and its tokens.
    """

    row: dict[str, Any]
    phases: list[Slice] = field(default_factory=list)
    inner: list[Slice] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    tokens: list[Moment] = field(default_factory=list)
    token_times: array[float] = field(default_factory=lambda: array("d"))
    preempted: Preempted | None = None  # preempted, and not admitted again
    last: float = float("-inf")  # time of its last event
