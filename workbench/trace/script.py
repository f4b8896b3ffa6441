"""Read a recorded run as a script: its inputs, and the steps planned from them. Standard library only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.trace.events import RecordedDecision, SpanRecord
from workbench.trace.recorder import Recorder, row_name

Rows = Iterable[Mapping[str, Any]]
REPORT_ONLY_ACTIONS = ("waiting", "refused_decision")  # actions that do not change the batch


class RecordedAction(NamedTuple):
    """An action of the scheduler on a sequence, with its reason."""

    sequence: str
    action: str
    reason: str


class RecordedInput(NamedTuple):
    """A submission or cancellation, which came before step `step` and after the first `event` events."""

    kind: str
    request_id: str
    step: int
    event: int


@dataclass(frozen=True)
class RecordedStep:
    """One planned step. `time` is its start, in seconds on the clock of that run."""

    number: int
    time: float
    spans: tuple[SpanRecord, ...]
    policy_decisions: tuple[RecordedDecision, ...]
    actions: tuple[RecordedAction, ...]

    @property
    def effects(self) -> tuple[tuple[str, str], ...]:
        """Return (sequence, action) for admissions, cuts, evictions and preemptions, in order."""
        return tuple((each.sequence, each.action) for each in self.actions if each.action not in REPORT_ONLY_ACTIONS)


@dataclass(frozen=True)
class StepScript:
    steps: tuple[RecordedStep, ...]
    inputs: tuple[RecordedInput, ...]

    @classmethod
    def from_tables(cls, inputs: Rows, spans: Rows, decisions: Rows) -> StepScript:
        """Build a script from the rows of a record's tables `inputs`, `spans` and `decisions`."""
        times: dict[int, float] = {}
        arriving: list[RecordedInput] = []
        policy_decisions: dict[int, list[RecordedDecision]] = defaultdict(list)
        for row in inputs:
            if row["kind"] in ("submitted", "cancelled"):
                arriving.append(RecordedInput(row["kind"], row["sequence"], row["step"], row["event"]))
            else:
                times[row["step"]] = row["time"]
                _add(policy_decisions[row["step"]], row)
        batches: dict[int, list[SpanRecord]] = defaultdict(list)
        for row in spans:
            times[row["step"]] = row["time"]
            batches[row["step"]].append(SpanRecord(row["sequence"], row["start"], row["tokens"], row["drafted"]))
        actions: dict[int, list[RecordedAction]] = defaultdict(list)
        for row in decisions:
            if row["kind"] == "threads_changed":  # decided by measured times, not by the scheduler
                continue
            actions[row["step"]].append(RecordedAction(row_name(dict(row)), row["action"], row["reason"]))
        steps = (
            RecordedStep(
                number, times[number], tuple(batches[number]), tuple(policy_decisions[number]), tuple(actions[number])
            )
            for number in sorted(times)
        )
        return cls(tuple(steps), tuple(arriving))

    @classmethod
    def from_recorder(cls, recorder: Recorder) -> StepScript:
        return cls.from_tables(recorder.inputs(), recorder.spans(), recorder.decisions())

    def same_as(self, other: StepScript) -> bool:
        """Return whether two scripts have equal steps, with the same decisions and reasons; times and step numbers may
        differ.
        """
        return len(self.steps) == len(other.steps) and all(map(_are_equal, self.steps, other.steps))


def _are_equal(one: RecordedStep, two: RecordedStep) -> bool:
    decisions = one.policy_decisions, two.policy_decisions
    if (one.spans, one.actions, len(decisions[0])) != (two.spans, two.actions, len(decisions[1])):
        return False
    return all(map(_decide_alike, *decisions))


def _decide_alike(one: RecordedDecision, two: RecordedDecision) -> bool:
    """Return whether two decisions are equal in the common length of both orders: whole groups are recorded, although
    the step's token budget may end within a group.
    """
    walked = min(len(one.order), len(two.order))
    return one._replace(order=one.order[:walked]) == two._replace(order=two.order[:walked])


def _add(decisions: list[RecordedDecision], row: Mapping[str, Any]) -> None:
    if row["kind"] == "policy_called":
        decisions.append(RecordedDecision(()))
        return
    decision, sequence = decisions[-1], row["sequence"]
    match row["kind"]:
        case "turn":
            decisions[-1] = decision._replace(order=(*decision.order, (sequence, row["tokens"])))
        case "keep":
            decisions[-1] = decision._replace(keep=(*decision.keep, sequence))
        case "preempted":
            decisions[-1] = decision._replace(preempted=(*decision.preempted, sequence))
        case "reason":
            decisions[-1] = decision._replace(reasons=(*decision.reasons, (sequence, row["reason"])))
