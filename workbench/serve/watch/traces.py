"""Keep traces of the last calls: description, tokens with times, the scheduler's reasons, steps."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.files import without_own_paths
from workbench.prompt.cache_miss import CacheMiss
from workbench.request import FinishReason
from workbench.serve.call import ADMIN, Call, Caller
from workbench.serve.gate import Outcome
from workbench.serve.served_model import PreparedPrompt
from workbench.settings import non_default_settings
from workbench.trace.events import (
    Decoded,
    Event,
    Finished,
    HandedOver,
    Moved,
    Preempted,
    Prefilled,
    Routed,
    Scheduled,
    Stepped,
    Submitted,
    Verified,
)

MAX_EVENTS = 100_000  # per call; further events are counted but not kept
# Approximate bytes in Python: of a call, an event, an alternative of a token, and a prompt token with its text.
BYTES_PER_CALL, BYTES_PER_EVENT, BYTES_PER_ALTERNATIVE, BYTES_PER_PROMPT_TOKEN = 4_096, 400, 120, 100


class CallTrace:
    """The trace of one call.

    Attributes:
        began: start in seconds on the engine's clock (`time.perf_counter`).
        is_moderated: the gate may have withheld text of the answer that the events contain.
        failure: why the call failed; only administrators see it.
    """

    def __init__(self, call: Call):
        self.call, self.created, self.began = call, time.time(), time.perf_counter()
        self.events: list[Event] = []
        self.dropped = 0
        self.prepared: list[PreparedPrompt] = []
        self.submitted: float | None = None
        self.outcome: Outcome | None = None
        self.is_moderated = False
        self.failure = ""

    def keep(self, events: list[Event]) -> None:
        """Keep the events of a step."""
        if len(self.events) < MAX_EVENTS:
            self.events += events
        else:
            self.dropped += len(events)

    @property
    def num_bytes(self) -> int:
        """Return the approximate size of the trace in bytes."""
        sampling, alternatives = self.call.sampling, self.call.prompt_logprobs
        event = BYTES_PER_EVENT + BYTES_PER_ALTERNATIVE * (sampling.logprobs or 0)
        token = BYTES_PER_PROMPT_TOKEN + (0 if alternatives is None else BYTES_PER_ALTERNATIVE * (alternatives + 1))
        tokens = sum(len(each.request.prompt_ids) for each in self.prepared)
        return BYTES_PER_CALL + event * len(self.events) + token * tokens

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def token_times(self) -> dict[tuple[str, int], list[float]]:
        """Return the times of the tokens of each sample, in seconds on the engine's clock."""
        found: dict[tuple[str, int], list[float]] = {}
        for event in self.of_kind(Decoded):
            found.setdefault((event.request_id, event.sample), []).append(event.time)
        return found

    def spans(self) -> dict[str, tuple[float, float]]:
        """Return (start, end) by name for each ended phase (prepare, queue, prefill, decode), in seconds after the call
        began.
        """
        first = lambda kind: next((event.time for event in self.events if isinstance(event, kind)), None)  # noqa: E731 (short)
        ended = max((event.time for event in self.of_kind(Finished)), default=None)
        admitted = next((e.time for e in self.of_kind(Scheduled) if e.action == "admitted"), None)
        marks = [
            ("prepare", self.began), ("queue", first(Submitted)), ("prefill", admitted or first(Prefilled)),
            ("decode", first(Decoded)), ("", ended),
        ]  # fmt: skip
        known = [(name, time) for name, time in marks if time is not None]
        pairs = zip(known, known[1:], strict=False)
        return {name: (begin - self.began, max(begin, end) - self.began) for (name, begin), (_, end) in pairs}

    def as_json(self, caller: Caller) -> dict[str, Any]:
        """Return the trace as JSON values for a caller; times are seconds since the call began.

        Only administrators see token ids and texts of a moderated answer, and the reason of a failure: the engine's
        message may hold data of other calls.
        """
        is_admin = ADMIN in caller.scopes
        call, has_text = self.call, not self.is_moderated or is_admin
        return {
            "id": call.id,
            "object": "workbench.trace",
            "created": int(self.created),
            "dialect": call.dialect,
            "model": call.model,
            "stream": call.stream,
            "sampling": {name: _plain(value) for name, value in non_default_settings(call.sampling)},
            "ignored": dict(call.ignored),
            "notes": _plain(call.notes),
            "prompts": [self._prompt(each) for each in self.prepared],
            "spans": [{"name": name, "start": a, "end": b} for name, (a, b) in self.spans().items()],
            "text_withheld": not has_text,
            "choices": self._choices(has_text, is_admin),
            "decisions": [
                self._decision(each, is_admin) for each in self.events
                if isinstance(each, Scheduled | Preempted | Prefilled | Routed | Moved | HandedOver)
            ],
            "steps": [self._step(each) for each in self.of_kind(Stepped)],
            "dropped_events": self.dropped,
            "outcome": _outcome(self.outcome),
            "failure": self.failure if is_admin else "",
        }  # fmt: skip

    def _decision(
        self, event: Scheduled | Preempted | Prefilled | Routed | Moved | HandedOver, is_admin: bool
    ) -> dict[str, Any]:
        """Return a decision with its reason: for a prefill chunk its tokens, for a handover its pages. A process's own
        error message is hidden from clients."""
        if isinstance(event, HandedOver):
            reason = f"{event.pages} pages"
        else:
            reason = f"{event.tokens} tokens" if isinstance(event, Prefilled) else without_own_paths(event.reason)
            reason = reason.partition(":")[0] if isinstance(event, Moved) and not is_admin else reason
        found = {
            "time": event.time - self.began, "step": getattr(event, "step", 0),
            "action": getattr(event, "action", event.kind), "reason": reason, "request": event.request_id,
        }  # fmt: skip
        if event.replica:
            found["replica"] = event.replica
        if isinstance(event, Routed):
            found["options"] = [each._asdict() for each in event.options]
        if isinstance(event, Moved):
            found |= {"source": event.source, "generated_tokens": event.generated_tokens}
        if isinstance(event, HandedOver):
            found["source"] = event.source
        return found

    def _prompt(self, prepared: PreparedPrompt) -> dict[str, Any]:
        request = prepared.request
        found: dict[str, Any] = {"request": request.request_id, "tokens": len(request.prompt_ids)}
        if request.cut_tokens:
            found["cut_tokens"] = request.cut_tokens
        if prepared.prompt is not None:
            found["segments"] = [
                {"name": each.name, "start": each.start, "tokens": len(each.token_ids)}
                for each in prepared.prompt.segments
            ]
        return found

    def _choices(self, has_text: bool, is_admin: bool) -> list[dict[str, Any]]:
        tokens: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for event in self.of_kind(Decoded):
            said = {"id": event.token_id, "text": event.text, "logprob": event.logprob} if has_text else {}
            tokens.setdefault((event.request_id, event.sample), []).append(
                {"time": event.time - self.began, "step": event.step, "channel": event.channel} | said
                | ({"replica": event.replica} if event.replica else {})
            )  # fmt: skip
        ends = {(each.request_id, each.sample): each for each in self.of_kind(Finished)}
        drafts: dict[str, list[int]] = {}
        for each in self.of_kind(Verified):
            counts = drafts.setdefault(each.request_id, [0, 0])
            counts[0], counts[1] = counts[0] + each.drafted, counts[1] + each.accepted
        found = []
        for key in dict.fromkeys([*tokens, *ends]):
            end = ends.get(key)
            found.append(
                {"request": key[0], "sample": key[1], "tokens": tokens.get(key, []),
                 "finished": None if end is None else _finished(end, is_admin),
                 "drafted_tokens": drafts.get(key[0], [0, 0])[0], "accepted_tokens": drafts.get(key[0], [0, 0])[1]}
            )  # fmt: skip
        return found

    def _step(self, step: Stepped) -> dict[str, Any]:
        return {
            "step": step.step, "time": step.time - self.began, "phase": step.phase, "requests": step.requests,
            "prefill_tokens": step.prefill_tokens, "decode_tokens": step.decode_tokens,
            "pages_used": step.pages_used, "context_tokens": step.context_tokens,
            "measured": {"seconds": step.wall_seconds, "forward_seconds": step.forward_seconds},
            "predicted": {"flops": step.predicted_flops, "bytes": step.predicted_bytes},
        } | ({"replica": step.replica} if step.replica else {})  # fmt: skip


class TraceStore:
    """The traces of the last calls, by id.

    Args:
        size: maximum number of traces.
        max_bytes: approximate maximum of all traces; the last trace alone may be larger.
    """

    def __init__(self, size: int, max_bytes: int = 256 << 20):
        self._size, self._max_bytes = size, max_bytes
        self._traces: OrderedDict[str, CallTrace] = OrderedDict()

    def add(self, trace: CallTrace) -> None:
        self._traces[trace.call.id] = trace
        self.trim()

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._traces.values())

    def trim(self) -> None:
        """Drop the oldest traces beyond the limits, after a trace was added or has grown."""
        num_bytes = self.num_bytes
        while len(self._traces) > self._size or (num_bytes > self._max_bytes and len(self._traces) > 1):
            num_bytes -= self._traces.popitem(last=False)[1].num_bytes

    def get(self, call_id: str, caller: Caller) -> CallTrace | None:
        """Return a trace if `caller` may see it: calls of the same tenant, or all calls for an administrator."""
        trace = self._traces.get(call_id)
        if trace is None or (trace.call.caller.tenant != caller.tenant and ADMIN not in caller.scopes):
            return None
        return trace

    def latest(self) -> list[CallTrace]:
        """Return the traces, the last call first."""
        return list(reversed(self._traces.values()))


def _finished(end: Finished, is_admin: bool) -> dict[str, Any]:
    error = without_own_paths(end.error) if is_admin or end.reason == FinishReason.REFUSED else ""
    return {
        "reason": end.reason, "ended_by": end.ended_by, "error": error, "completion_tokens": len(end.token_ids),
        "cached_tokens": end.cached_tokens, "computed_tokens": end.computed_tokens,
        "written_tokens": end.written_tokens, "restored_tokens": end.restored_tokens, "score": end.score,
        "is_cancelled": end.reason == FinishReason.CANCELLED,
    }  # fmt: skip


def _outcome(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    used = {name: getattr(outcome.used, name) for name in outcome.used.__dataclass_fields__ if name != "choice"}
    return {
        "ended": outcome.ended,
        "seconds": outcome.seconds,
        "first_token_seconds": outcome.first_token_seconds,
        "used": _plain(used),
    }


def _plain(value: Any) -> Any:
    """Return a value in JSON types; other values become text."""
    if isinstance(value, CacheMiss):
        return _plain(value.as_values() | {"text": str(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and not isinstance(value, str):
        return [_plain(each) for each in value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return str(value)
    return value if value is None or isinstance(value, int | float | bool) else without_own_paths(str(value))
