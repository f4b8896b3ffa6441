"""Record every event of a run, and return tables on demand. Recording an event is one append."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from workbench.trace.events import (
    Cancelled,
    Decoded,
    Event,
    Finished,
    Preempted,
    Prefilled,
    Routed,
    Scheduled,
    Stepped,
    StepPlanned,
    Submitted,
    ThreadsChanged,
    Verified,
)

STEP_FIELDS = tuple(f.name for f in fields(Stepped) if f.name not in ("request_id", "text", "sample"))


class RowNumbers:
    """An assignment of events to rows of `Recorder.requests`: one row per submission and sample."""

    def __init__(self) -> None:
        self._count = 0
        self._active: dict[tuple[str, int], list[int]] = {}

    def row_of(self, event: Event) -> int | None:
        """Return the row number of `event`; None if the event does not belong to a single request."""
        if not event.request_id or isinstance(event, Cancelled):
            return None
        mine = self._active.setdefault((event.request_id, event.sample), [])
        if isinstance(event, Submitted) or not mine:
            mine.append(self._count)
            self._count += 1
        if not isinstance(event, Finished):
            return mine[-1]
        number = mine.pop()  # after a refused duplicate id, the id means the older row again
        if not mine:
            del self._active[event.request_id, event.sample]
        return number


class Recorder:
    """The events of a run in order. Tables are lists of dicts; times are raw seconds, never rounded."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)

    def requests(self) -> list[dict]:
        """Return one row per submission and sample, in order of submission. A request has only one row however often it
        is preempted.

        `arrival` is the time of submission if none was given. Times of events that did not happen are None.
        """
        rows: list[dict] = []
        for number, event in self.by_request():
            if number == len(rows):
                rows.append(empty_row(event.request_id, event.sample))
            update_row(rows[number], event)
        return rows

    def by_request(self) -> Iterator[tuple[int, Event]]:
        """Yield the events of single requests, each with its row number in `requests()`."""
        numbers = RowNumbers()
        for event in self.events:
            number = numbers.row_of(event)
            if number is not None:
                yield number, event

    def steps(self) -> list[dict]:
        """Return one row per step with all fields of `Stepped`, including the replica; `time` is the step's end."""
        steps = [event for event in self.events if isinstance(event, Stepped)]
        return [{name: getattr(step, name) for name in STEP_FIELDS} for step in steps]

    def tokens(self) -> list[dict]:
        """Return one row per output token, in order of sampling."""
        names = ("request_id", "sample", "index", "token_id", "time", "logprob", "step")
        return [{name: getattr(e, name) for name in names} for e in self.events if isinstance(e, Decoded)]

    def verifications(self) -> list[dict]:
        """Return one row per verification of draft tokens: the tokens, and how many were accepted."""
        names = ("time", "step", "request_id", "sample", "drafted", "accepted")
        return [
            {**{name: getattr(e, name) for name in names}, "token_ids": list(e.token_ids)}
            for e in self.events
            if isinstance(e, Verified)
        ]

    def spans(self) -> list[dict]:
        """Return one row per span of every step, in packed order; `time` is when the step began."""
        return [
            {"time": event.time, "step": event.step, **span._asdict()}
            for event in self.events
            if isinstance(event, StepPlanned)
            for span in event.spans
        ]

    def inputs(self) -> list[dict]:
        """Return one row per input of the scheduler, in order: submissions, cancellations and the policy's decisions.

        A run's steps can be planned again from them (engine/replay.py). `event` is the number of earlier events; `step`
        is the next step, or the step for which the policy was called.
        """
        rows: list[dict] = []
        step = next((event.step for event in self.events if isinstance(event, StepPlanned)), 0)
        for place, event in enumerate(self.events):
            if isinstance(event, StepPlanned):
                rows += [
                    {"event": place, "time": event.time, "step": event.step, **row} for row in _decision_rows(event)
                ]
                step = event.step + 1
            elif isinstance(event, Cancelled) or (isinstance(event, Submitted) and not event.sample):
                row = {"kind": event.kind, "sequence": event.request_id, "tokens": None, "reason": ""}
                rows.append({"event": place, "time": event.time, "step": step, **row})
        return rows

    def routes(self) -> list[dict]:
        """Return one row for each replica that a router considered for a request, in order; `chosen` is True for the
        replica that got the request.

        A request that moved to another replica has further rows, with a later time.
        """
        return [
            {"time": e.time, "request_id": e.request_id, "sample": e.sample, **option._asdict(),
             "chosen": option.replica == e.replica, "reason": e.reason}
            for e in self.events if isinstance(e, Routed) for option in e.options
        ]  # fmt: skip

    def decisions(self) -> list[dict]:
        """Return one row for each decision of the scheduler (`kind` is planned), for each preemption that results
        (preempted), and for each change of the number of threads (threads_changed; `action` is the new number).
        """
        return [
            {
                "time": e.time,
                "step": e.step,
                "request_id": e.request_id,
                "sample": e.sample,
                "kind": e.kind,
                "action": _action(e),
                "reason": e.reason,
            }
            for e in self.events
            if isinstance(e, (Scheduled, Preempted, ThreadsChanged))
        ]


def _action(event: Scheduled | Preempted | ThreadsChanged) -> str:
    match event:
        case Scheduled():
            return event.action
        case Preempted():
            return "preempted"
        case ThreadsChanged():
            return str(event.threads)


def _decision_rows(event: StepPlanned) -> Iterator[dict]:
    for decision in event.policy_decisions:
        yield {"kind": "policy_called", "sequence": "", "tokens": None, "reason": ""}
        for name in decision.preempted:
            yield {"kind": "preempted", "sequence": name, "tokens": None, "reason": ""}
        for name, max_tokens in decision.order:
            yield {"kind": "turn", "sequence": name, "tokens": max_tokens, "reason": ""}
        for name in decision.keep:
            yield {"kind": "keep", "sequence": name, "tokens": None, "reason": ""}
        for name, reason in decision.reasons:
            yield {"kind": "reason", "sequence": name, "tokens": None, "reason": reason}


def row_name(row: dict) -> str:
    """Return the name of a row's sequence: request and sample."""
    return f"{row['request_id']}#{row['sample']}" if row.get("sample") else row["request_id"]


def empty_row(request_id: str, sample: int) -> dict:
    """Return the row of a request that has no events yet: its id and sample, and empty values in all other columns."""
    return {
        "request_id": request_id,
        "sample": sample,
        "arrival": None,
        "submitted": None,
        "first_scheduled": None,
        "first_token": None,
        "finished": None,
        "prompt_tokens": 0,
        "cut_tokens": 0,
        "tenant": "",
        "priority": 0,
        "deadline": None,
        "output_tokens": 0,
        "cached_tokens": 0,
        "computed_tokens": 0,
        "restored_tokens": 0,
        "written_tokens": 0,
        "shared_pages": 0,
        "finish_reason": None,
        "error": None,
        "num_preemptions": 0,
        "output_text": "",
        "token_ids": [],
    }


def update_row(row: dict, event: Event) -> None:
    """Enter one event into the row of its request."""
    match event:
        case Submitted():
            row["submitted"], row["arrival"] = event.time, event.arrival or event.time
            for name in ("prompt_tokens", "cut_tokens", "tenant", "priority", "deadline"):
                row[name] = getattr(event, name)
        case Scheduled(action="admitted") | Prefilled():
            _first(row, "first_scheduled", event.time)
        case Decoded():
            _first(row, "first_scheduled", event.time)
            _first(row, "first_token", event.time)
            row["token_ids"].append(event.token_id)
            row["output_tokens"] += 1
            row["output_text"] += event.text
        case Preempted():
            row["num_preemptions"] += 1
        case Finished():
            row["finished"], row["finish_reason"] = event.time, str(event.reason)
            row["error"] = event.error or None
            for name in ("cached_tokens", "computed_tokens", "restored_tokens", "written_tokens", "shared_pages"):
                row[name] = getattr(event, name)
            row["prompt_tokens"] = event.prompt_tokens or row["prompt_tokens"]
            if event.reason != "refused":
                row["token_ids"] = list(event.token_ids) or row["token_ids"]
                row["output_tokens"] = len(row["token_ids"])
                row["output_text"] = event.output_text or row["output_text"] + event.text


def _first(row: dict, name: str, time: float) -> None:
    if row[name] is None:
        row[name] = time
