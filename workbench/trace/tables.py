"""Rebuild events from the tables in a run folder, so that a run without a trace can be drawn too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from workbench.trace.events import Decoded, Event, Finished, Scheduled, Stepped, Submitted
from workbench.trace.recorder import STEP_FIELDS

Row = Mapping[str, Any]
SUBMITTED_FIELDS = ("prompt_tokens", "cut_tokens", "tenant", "priority", "deadline")
FINISHED_FIELDS = (
    "output_text", "prompt_tokens", "cached_tokens", "computed_tokens", "restored_tokens", "written_tokens",
    "shared_pages",
)  # fmt: skip
ORDER = (Submitted, Scheduled, Decoded, Finished, Stepped)  # order of events with the same time
TOKEN_FIELDS = ("index", "token_id", "logprob", "step", "sample")


def events_of_tables(requests: Iterable[Row], tokens: Iterable[Row], steps: Iterable[Row]) -> list[Event]:
    """Return the events of `Recorder.requests`, `tokens` and `steps`, in order of time.

    Requests of several variants and rounds get the columns `variant` and `round` as a prefix of their names. Data that
    is not in the tables is missing: prefill chunks, preemptions, reasons.
    """
    made = [*_of_requests(requests), *_of_tokens(tokens), *_of_steps(steps)]
    return sorted(made, key=lambda event: (event.time, ORDER.index(type(event))))


def _name(row: Row) -> str:
    variant, number = row.get("variant"), row.get("round")
    words = [variant or ""] * bool(variant) + [f"round {number}"] * (number is not None)
    return ": ".join([", ".join(words), row["request_id"]]) if words else row["request_id"]


def _of_requests(rows: Iterable[Row]) -> Iterator[Event]:
    for row in rows:
        name, sample = _name(row), row["sample"]
        if row["submitted"] is not None:
            arrival = row["submitted"] if row["arrival"] is None else row["arrival"]
            known = {each: row[each] for each in SUBMITTED_FIELDS if row.get(each) is not None}
            yield Submitted(row["submitted"], name, sample=sample, arrival=arrival, **known)
        if row["first_scheduled"] is not None:
            yield Scheduled(row["first_scheduled"], name, sample=sample, action="admitted")
        if row["finished"] is not None:
            known = {each: row[each] for each in FINISHED_FIELDS if row.get(each) is not None}
            ids = tuple(row.get("token_ids") or ())
            reason, error = row["finish_reason"] or "", row["error"] or ""
            yield Finished(row["finished"], name, sample=sample, reason=reason, error=error, token_ids=ids, **known)


def _of_tokens(rows: Iterable[Row]) -> Iterator[Event]:
    for row in rows:
        yield Decoded(row["time"], _name(row), **{each: row[each] for each in TOKEN_FIELDS})


def _of_steps(rows: Iterable[Row]) -> Iterator[Event]:
    for row in rows:
        yield Stepped(**{each: row[each] for each in STEP_FIELDS if each in row})
