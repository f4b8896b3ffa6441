"""Replay the steps of a recorded run, with the batches that were formed then by wall-clock arrivals.

Requests are submitted and cancelled before the same steps, and the policy's decisions are the recorded ones; clocks
have no influence. The scheduler's plans are compared with the record, step by step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from workbench.engine.inputs import arrival
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request
from workbench.scheduler.policy import SchedulerDecision, SchedulerState, SchedulingPolicy, Turn
from workbench.scheduler.validate import policy_name
from workbench.trace.events import Event, Finished, RecordedDecision, SpanRecord
from workbench.trace.recorder import Recorder
from workbench.trace.script import RecordedInput, RecordedStep, StepScript


class ReplayDiverged(WorkbenchError):
    """Raised if a replay differs from the record; the message names the step and the reason."""


class RecordedPolicy:
    """A scheduling policy that returns the recorded decisions step by step, with the attributes of the original
    policy.
    """

    def __init__(self, policy: SchedulingPolicy):
        self.kind, self.steady = policy_name(policy), getattr(policy, "steady", False)
        self.padded = getattr(policy, "padded", False)
        self._left: deque[RecordedDecision] = deque()
        self._most = 0

    def begin(self, decisions: Iterable[RecordedDecision]) -> None:
        self._left = deque(decisions)
        self._most = len(self._left)

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        if not self._left:
            raise WorkbenchError(f"the record has {self._most} decisions, and the policy needs one more")
        decision = self._left.popleft()
        requests = {entry.request_id: entry for entry in (*state.running, *state.waiting)}
        order = [
            requests[name] if max_tokens is None else Turn(requests[name], max_tokens)
            for name, max_tokens in decision.order
        ]
        keep, preempted = ([requests[name] for name in names] for names in (decision.keep, decision.preempted))
        return SchedulerDecision(order, keep or None, preempted, dict(decision.reasons))


def replay(runner: Runner, requests: Iterable[Request], script: StepScript) -> Iterator[Event]:
    """Replay `requests` by the recorded steps `script`, and yield the events.

    Closing the iterator cancels requests in progress and restores the runner's own policy.

    Raises:
        ReplayDiverged: at the first different step.
    """
    return _Replay(runner, requests, script).stream()


class _Replay:
    def __init__(self, runner: Runner, requests: Iterable[Request], script: StepScript):
        self.runner, self.script = runner, script
        self.recorder = Recorder()
        self.policy = RecordedPolicy(runner.scheduler.policy)
        self._requests: dict[str, deque[Request]] = defaultdict(deque)
        for request in sorted(requests, key=arrival):
            self._requests[request.request_id].append(request)
        self._coming = deque(script.inputs)
        self._queue: deque[Event] = deque()
        self._ended: dict[str, str] = {}
        self._time = script.steps[0].time if script.steps else 0.0

    def stream(self) -> Iterator[Event]:
        try:
            with self._in_place():
                for step in self.script.steps:
                    self._enter(lambda coming, step=step: coming.step <= step.number)
                    self._run_step(step)
                    yield from self._pop_events()
                self._enter(lambda _: True)
                yield from self._pop_events()
                self._check_effects()
                if self.runner.has_unfinished_requests:
                    raise ReplayDiverged(
                        "replay: the record ends here, and requests still go on; it was not recorded whole"
                    )
        finally:
            self.runner.cancel_all(self._queue)

    def _run_step(self, step: RecordedStep) -> None:
        self.policy.begin(step.policy_decisions)
        self._time, heard = step.time, len(self.recorder.events)
        try:
            self.runner.step(self._queue)
        except WorkbenchError as error:
            raise ReplayDiverged(f"replay: step {step.number} cannot be formed: {error}") from error
        now = StepScript.from_recorder(_since(self.recorder, heard)).steps
        if not now or now[0].spans != step.spans:
            raise ReplayDiverged(f"replay: step {step.number} differs from the record: {self._difference(step, now)}")

    def _difference(self, step: RecordedStep, now: tuple[RecordedStep, ...]) -> str:
        """Describe the first different span, with the reason if known."""
        before = {span.sequence: span for span in step.spans}
        planned = {span.sequence: span for span in now[0].spans} if now else {}
        reasons = {each.sequence: each.reason for each in (now[0].actions if now else ())}
        for name in (*before, *planned):
            then, here = (_words(spans.get(name)) for spans in (before, planned))
            if then != here:
                reason = reasons.get(name) or self._ended.get(name, "")
                return f"of {name} the record computes {then}, now {here}" + (f" ({reason})" if reason else "")
        return "the same spans in another order"

    def _check_effects(self) -> None:
        now = StepScript.from_recorder(self.recorder).steps
        for step, made in zip(self.script.steps, now, strict=False):
            if step.effects != made.effects:
                then, here = (", ".join(map(" ".join, each.effects)) or "nothing" for each in (step, made))
                raise ReplayDiverged(f"replay: step {step.number}: the record decides {then}; now {here}")

    def _enter(self, is_due: Callable[[RecordedInput], bool]) -> None:
        while self._coming and is_due(self._coming[0]):
            kind, name, step, _ = self._coming.popleft()
            if kind == "cancelled":
                self.runner.cancel(name)
            elif self._requests[name]:
                self.runner.submit(self._requests[name].popleft(), self._queue)
                self.runner.core.wait_for_grammars()
            else:
                raise ReplayDiverged(f"replay: before step {step} the record submits {name}, which this workload lacks")

    def _note(self, event: Event) -> None:
        """Cancel the requests that another listener cancelled at this event in the record, also within a step."""
        self.recorder.record(event)
        if isinstance(event, Finished):
            self._ended[event.request_id] = f"it has ended: {event.error or event.reason}"
        heard = len(self.recorder.events)
        self._enter(lambda coming: coming.kind == "cancelled" and coming.event <= heard)

    def _pop_events(self) -> Iterator[Event]:
        while self._queue:
            yield self._queue.popleft()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Install the recorded policy, a listener before the runner's own, and the record's clock for cached pages."""
        runner, listener = self.runner, self.runner.telemetry.listener
        policy, index = runner.scheduler.policy, runner.kv_cache.manager.prefix_cache
        clock = index.clock if index is not None else runner.clock

        def note(event: Event) -> None:
            if listener is not None:
                listener(event)
            self._note(event)

        try:
            runner.scheduler.set_policy(self.policy)
            runner.set_listener(note)
            if index is not None:
                index.set_clock(lambda: self._time)
            yield
        finally:
            runner.scheduler.set_policy(policy)
            runner.set_listener(listener)
            if index is not None:
                index.set_clock(clock)


def _since(recorder: Recorder, place: int) -> Recorder:
    part = Recorder()
    part.events = recorder.events[place:]
    return part


def _words(span: SpanRecord | None) -> str:
    if span is None:
        return "nothing"
    return f"{span.tokens} tokens from {span.start}" + (f", {span.drafted} of them drafted" if span.drafted else "")
