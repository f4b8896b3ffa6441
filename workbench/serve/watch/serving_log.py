"""Keep the current state of a server, from its runners' events.

owner's thread: record(event) ---> pending events ---> reader's thread: fold, snapshot() ---> ServerSnapshot
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock

from workbench.serve.watch.snapshot import (
    STATES,
    LatencyPercentiles,
    Meter,
    PageUse,
    RequestStatus,
    RequestTrace,
    ServerSnapshot,
    TokenRate,
    TracedDecision,
    TracedToken,
)
from workbench.trace.events import (
    Cancelled,
    Decoded,
    Event,
    Finished,
    Moved,
    Preempted,
    Prefilled,
    Routed,
    Scheduled,
    Stepped,
    Submitted,
)

WINDOW_SECONDS = 60
RATE_SECONDS = 10  # window for the current tokens per second
MAX_RECENT = 128  # requests in a snapshot, and ended requests kept
MAX_TRACED = 1024  # tokens, and decisions, in a request's trace
MAX_PENDING = 4096  # unread events; beyond it, recording folds two for each new one
MAX_LATENCIES = 8192  # values for percentiles
END_STATES = {"cancelled": "cancelled", "refused": "failed", "error": "failed"}  # other reasons: finished


@dataclass(eq=False, slots=True)
class _RequestLog:
    """A request as known from its folded events."""

    id: str
    state: str
    arrival: float
    tenant: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    reason: str = ""
    prefilled: bool = False
    preempted: list[tuple[float, float | None]] = field(default_factory=list)
    tokens: deque[TracedToken] = field(default_factory=lambda: deque(maxlen=MAX_TRACED))
    decisions: deque[TracedDecision] = field(default_factory=lambda: deque(maxlen=MAX_TRACED))
    dropped: int = 0

    def trace(self, kept: deque, item: TracedToken | TracedDecision) -> None:
        self.dropped += len(kept) == kept.maxlen
        kept.append(item)

    def resume(self, now: float) -> None:
        """End the current preemption."""
        if self.preempted and self.preempted[-1][1] is None:
            self.preempted[-1] = (self.preempted[-1][0], now)

    def traced(self) -> RequestTrace:
        return RequestTrace(tuple(self.tokens), tuple(self.decisions), self.dropped)

    def status(self) -> RequestStatus:
        return RequestStatus(
            self.id, self.state, self.arrival, self.first_scheduled, self.first_token, self.last_token, self.ended,
            self.prompt_tokens, self.cached_tokens, self.output_tokens, self.tenant, self.reason,
            tuple(self.preempted),
        )  # fmt: skip


class ServingLog:
    """A bounded log of a runner's requests; give `record` to `RunnerThread.listen`.

    `record` only stores an event: snapshots are made in their reader's thread. Memory is bounded by the running
    requests and the last `MAX_RECENT` that ended, even if no snapshots are read.
    """

    def __init__(
        self,
        model: str = "",
        pages: Callable[[], PageUse] = PageUse,
        meters: Callable[[], Iterable[Meter]] = tuple,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Args:
        model: the name, or names, that the server answers to.
        pages: counts the pages of the KV cache; called in the reader's thread.
        meters: what the gate counts; called in the reader's thread.
        clock: the runner's.
        """
        self.model, self.began = model, clock()
        self._pages, self._meters, self._clock = pages, meters, clock
        self._watchers: list[Callable[[], None]] = []
        self._pending: deque[Event] = deque()
        self._folding = Lock()  # guards the fields below
        self._active: dict[tuple[str, int], list[_RequestLog]] = {}  # several under one key: the latest will be refused
        self._ended: deque[_RequestLog] = deque(maxlen=MAX_RECENT)
        self._states: Counter[str] = Counter()
        self._rates: deque[list[int]] = deque()  # [second since the beginning, prompt tokens, output tokens]
        self._ttft: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)  # (time, seconds)
        self._tpot: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)
        self._prompts: deque[tuple[float, int, int]] = deque(maxlen=MAX_LATENCIES)  # (time, prompt, cached tokens)

    def record(self, event: Event) -> None:
        """Store an event. If no snapshot was made for long, fold the two oldest stored events."""
        self._pending.append(event)
        if len(self._pending) > MAX_PENDING and self._folding.acquire(blocking=False):
            try:
                self._fold(2)
            finally:
                self._folding.release()
        for on_change in tuple(self._watchers):
            on_change()

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` after every event, in the thread that records it; return a function that stops it."""
        self._watchers.append(on_change)
        return lambda: self._watchers.remove(on_change) if on_change in self._watchers else None

    def trace(self, request_id: str) -> RequestTrace | None:
        """Return the trace of a running or recently ended request; None if it is unknown."""
        with self._folding:
            self._fold(len(self._pending))
            return next((each.traced() for each in reversed(self._known()) if each.id == request_id), None)

    def snapshot(self, traces: bool = False) -> ServerSnapshot:
        """Return the server's current state; with `traces`, also the traces of recent requests."""
        with self._folding:
            self._fold(len(self._pending))
            now = self._clock()
            since = now - WINDOW_SECONDS
            recent = sorted(self._known(), key=lambda each: each.arrival)[-MAX_RECENT:]
            prompts = [each for each in self._prompts if each[0] >= since]
            rates, prompt_rate, output_rate = self._window_rates(now)
            return ServerSnapshot(
                time=now,
                wall_time=time.time(),
                window=float(WINDOW_SECONDS),
                model=self.model,
                uptime=now - self.began,
                requests={state: self._states[state] for state in STATES},
                prompt_tokens_per_second=prompt_rate,
                output_tokens_per_second=output_rate,
                rates=rates,
                ttft=LatencyPercentiles.over([value for at, value in self._ttft if at >= since]),
                tpot=LatencyPercentiles.over([value for at, value in self._tpot if at >= since]),
                pages=self._pages(),
                prompt_tokens=sum(tokens for _, tokens, _ in prompts),
                cached_tokens=sum(cached for _, _, cached in prompts),
                meters=tuple(self._meters()),
                recent=tuple(each.status() for each in recent),
                traces={each.id: each.traced() for each in recent} if traces else {},
            )

    def _known(self) -> list[_RequestLog]:
        return [*self._ended, *(each for stack in self._active.values() for each in stack)]

    def _window_rates(self, now: float) -> tuple[tuple[TokenRate, ...], float, float]:
        """Return the tokens of each second of the window, and the current prompt and output tokens per second."""
        last = max(0, int(now - self.began))
        first = max(0, last - WINDOW_SECONDS + 1)
        by_second = {second: (prompt, output) for second, prompt, output in self._rates}
        rates = tuple(
            TokenRate(self.began + second, *by_second.get(second, (0, 0))) for second in range(first, last + 1)
        )
        latest = rates[-RATE_SECONDS:]
        seconds = max(now - latest[0].time, 1.0)  # at least 1 s: no rate from a few milliseconds
        return (
            rates,
            sum(each.prompt_tokens for each in latest) / seconds,
            sum(each.output_tokens for each in latest) / seconds,
        )

    def _fold(self, count: int) -> None:
        for _ in range(min(count, len(self._pending))):
            self._fold_event(self._pending.popleft())

    def _fold_event(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._count(event.time, event.prefill_tokens, 0)
        if not event.request_id or isinstance(event, Cancelled):
            return
        each = self._request_of(event)
        now = event.time
        match event:
            case Scheduled():
                each.trace(each.decisions, TracedDecision(now, event.step, event.action, event.reason))
                if event.action == "admitted":
                    self._begin(each, now)
            case Prefilled():
                self._begin(each, now)
                each.trace(each.decisions, TracedDecision(now, event.step, "prefilled", f"{event.tokens} tokens"))
                if not each.prefilled:
                    each.prefilled, each.cached_tokens = True, max(0, event.computed - event.tokens)
                    self._prompts.append((now, each.prompt_tokens, min(each.cached_tokens, each.prompt_tokens)))
            case Decoded():
                self._begin(each, now)
                self._move(each, "decode")
                if each.first_token is None:
                    each.first_token = now
                    self._ttft.append((now, now - each.arrival))
                each.last_token = now
                each.output_tokens += 1
                self._count(now, 0, 1)
                each.trace(each.tokens, TracedToken(now, event.token_id, event.text, event.step))
            case Preempted():
                each.resume(now)
                each.preempted.append((now, None))
                each.trace(each.decisions, TracedDecision(now, event.step, "preempted", event.reason))
                self._move(each, "waiting")
            case Routed():
                words = f"to replica {event.replica}: {event.reason}"
                each.trace(each.decisions, TracedDecision(now, 0, "routed", words))
            case Moved():
                words = f"from replica {event.source} to {event.replica}: {event.reason}"
                each.trace(each.decisions, TracedDecision(now, 0, "moved", words))
            case Finished():
                self._end(each, event)

    def _request_of(self, event: Event) -> _RequestLog:
        """Return the request of an event. A request with a running request's id is refused: the next end is its own."""
        key = (event.request_id, event.sample)
        mine = self._active.setdefault(key, [])
        if isinstance(event, Submitted) or not mine:
            name = f"{event.request_id}#{event.sample}" if event.sample else event.request_id
            each = _RequestLog(name, "waiting", event.time)
            if isinstance(event, Submitted):
                each.arrival, each.prompt_tokens = event.arrival or event.time, event.prompt_tokens
                each.tenant = event.tenant
            self._states["waiting"] += 1
            mine.append(each)
        return mine[-1]

    def _begin(self, each: _RequestLog, now: float) -> None:
        """Note that a step has computed, or will compute, tokens of a request."""
        if each.first_scheduled is None:
            each.first_scheduled = now
        each.resume(now)
        if each.state == "waiting":
            self._move(each, "prefill")

    def _end(self, each: _RequestLog, event: Finished) -> None:
        each.resume(event.time)
        each.ended, each.reason = event.time, event.error or event.reason
        each.prompt_tokens = event.prompt_tokens or each.prompt_tokens
        unseen = max(0, len(event.token_ids) - each.output_tokens)  # the request has no events for single tokens
        self._count(event.time, 0, unseen)
        each.output_tokens += unseen
        self._move(each, END_STATES.get(event.reason, "finished"))
        tpot = each.status().tpot
        if each.state == "finished" and tpot is not None:
            self._tpot.append((event.time, tpot))
        key = (event.request_id, event.sample)
        self._active[key].remove(each)
        if not self._active[key]:
            del self._active[key]
        self._ended.append(each)

    def _move(self, each: _RequestLog, state: str) -> None:
        self._states[each.state] -= 1
        self._states[state] += 1
        each.state = state

    def _count(self, now: float, prompt_tokens: int, output_tokens: int) -> None:
        second = max(0, int(now - self.began))
        if not self._rates or self._rates[-1][0] < second:
            self._rates.append([second, 0, 0])
            while self._rates[0][0] <= second - WINDOW_SECONDS:
                self._rates.popleft()
        self._rates[-1][1] += prompt_tokens
        self._rates[-1][2] += output_tokens
