"""Read a recorded run as a script: its inputs, and the steps planned from them. Standard library only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.trace.events import Ask, SpanNote
from workbench.trace.recorder import Recorder, row_name

Rows = Iterable[Mapping[str, Any]]
TOLD = ("waiting", "refused_wish")  # actions without effect on the batch


class Action(NamedTuple):
    """An action of the scheduler on a sequence, with its reason."""

    sequence: str
    action: str
    reason: str


class Input(NamedTuple):
    """A request submitted or cancelled, before step `step` and after so many events."""

    kind: str
    request_id: str
    step: int
    event: int


@dataclass(frozen=True)
class Step:
    """One step as it was planned. `time` is when it began, in seconds on the clock of that run."""

    number: int
    time: float
    spans: tuple[SpanNote, ...]
    asked: tuple[Ask, ...]
    actions: tuple[Action, ...]

    @property
    def deeds(self) -> tuple[tuple[str, str], ...]:
        """Return (sequence, action) for admissions, cuts, evictions and preemptions, in order."""
        return tuple((each.sequence, each.action) for each in self.actions if each.action not in TOLD)


@dataclass(frozen=True)
class Script:
    steps: tuple[Step, ...]
    inputs: tuple[Input, ...]

    @classmethod
    def of(cls, inputs: Rows, spans: Rows, decisions: Rows) -> Script:
        """Build a script from the rows of a record's tables of these names."""
        times: dict[int, float] = {}
        coming: list[Input] = []
        asked: dict[int, list[Ask]] = defaultdict(list)
        for row in inputs:
            if row["kind"] in ("submitted", "cancelled"):
                coming.append(Input(row["kind"], row["sequence"], row["step"], row["event"]))
            else:
                times[row["step"]] = row["time"]
                _add(asked[row["step"]], row)
        batches: dict[int, list[SpanNote]] = defaultdict(list)
        for row in spans:
            times[row["step"]] = row["time"]
            batches[row["step"]].append(SpanNote(row["sequence"], row["start"], row["tokens"], row["drafted"]))
        actions: dict[int, list[Action]] = defaultdict(list)
        for row in decisions:
            if row["kind"] == "threads_changed":  # the clock's doing, not the scheduler's
                continue
            actions[row["step"]].append(Action(row_name(dict(row)), row["action"], row["reason"]))
        steps = (
            Step(number, times[number], tuple(batches[number]), tuple(asked[number]), tuple(actions[number]))
            for number in sorted(times)
        )
        return cls(tuple(steps), tuple(coming))

    @classmethod
    def recorded(cls, recorder: Recorder) -> Script:
        return cls.of(recorder.inputs(), recorder.spans(), recorder.decisions())

    def same_as(self, other: Script) -> bool:
        """Return whether the steps are equal, with decisions and reasons; times and step numbers may differ."""
        return _plain(self.steps) == _plain(other.steps)


def _plain(steps: Sequence[Step]) -> list[tuple]:
    return [(step.spans, step.asked, step.actions) for step in steps]


def _add(asks: list[Ask], row: Mapping[str, Any]) -> None:
    if row["kind"] == "asked":
        asks.append(Ask(()))
        return
    ask = asks[-1]
    match row["kind"]:
        case "wish" if row["tokens"] is not None:
            asks[-1] = ask._replace(tokens=(*ask.tokens, (row["sequence"], row["tokens"])))
        case "set_back":
            asks[-1] = ask._replace(set_back=(*ask.set_back, row["sequence"]))
        case "because":
            asks[-1] = ask._replace(because=(*ask.because, (row["sequence"], row["reason"])))
