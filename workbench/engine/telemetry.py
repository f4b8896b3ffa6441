"""Emit events to the listener, with an event for each step that has its predicted cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.kv_cache.pages import PagePool
from workbench.kv_cache.store import KVStore
from workbench.model.cost import StepCostModel
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import StepPlan
from workbench.scheduler.policy import RequestView, RunningViews, SchedulerDecision, Turn
from workbench.trace.events import Event, RecordedDecision, SpanRecord, Stepped, StepPlanned


@dataclass(frozen=True)
class StepTimestamps:
    """The times at which a step began, was planned and was computed, and the seconds spent on drafting."""

    start: float
    draft_seconds: float
    planned: float
    computed: float


class Telemetry:
    """The telemetry of a runner: `listener` receives every event. The time that the listener takes is measured and
    reported with the step.

    Errors of the listener are stored until the current work is done (`raise_listener_error`).
    """

    def __init__(
        self,
        model: Transformer,
        store: KVStore,
        pools: tuple[PagePool, ...],
        clock: Callable[[], float],
        listener: Callable[[Event], None] | None,
    ):
        self.listener = listener
        self._clock = clock
        self._cost = StepCostModel(model.spec, *model.bytes_per_weight, store.bytes_per_value)
        self._pools = [(pool, store.page_bytes(table)) for table, pool in enumerate(pools)]
        self._seconds = 0.0  # the listener's time since the last step
        self._listener_error: BaseException | None = None

    def set_listener(self, listener: Callable[[Event], None] | None) -> None:
        """Call `listener` with every event from now on; None removes it."""
        self.listener = listener

    def emit(self, event: Event) -> None:
        if self.listener is not None:
            began = self._clock()
            self._call_listener(event)
            self._seconds += self._clock() - began

    def raise_listener_error(self) -> None:
        """Raise the first error of the listener since the last call, if there was one."""
        error, self._listener_error = self._listener_error, None
        if error is not None:
            raise error

    def _call_listener(self, event: Event) -> None:
        assert self.listener is not None
        try:
            self.listener(event)
        except BaseException as error:  # raised within a step it would lose other requests' events
            self._listener_error = self._listener_error or error

    def emit_step_planned(self, plan: StepPlan, start: float) -> None:
        """Emit StepPlanned: the spans of the step and the policy's decisions."""
        if self.listener is None:
            return
        noting = self._clock()
        spans = tuple(SpanRecord(s.sequence.request_id, s.start, s.length, len(s.draft_token_ids)) for s in plan.spans)
        decisions = tuple(map(recorded, plan.policy_decisions))
        self._call_listener(StepPlanned(start, step=plan.step, spans=spans, policy_decisions=decisions))
        self._seconds += self._clock() - noting

    def pages_in_use(self) -> list[tuple[int, int]]:
        """Return (pages in use, bytes per page) by cache group."""
        return [(pool.num_used, size) for pool, size in self._pools]

    def emit_step(
        self,
        plan: StepPlan,
        pages_in_use: list[tuple[int, int]],
        times: StepTimestamps,
        accepted: int,
        compiles: int,
        kernel_seconds: float | None = None,
    ) -> Stepped:
        """Emit Stepped for a whole step, from `times.start` until now, and return it.

        Args:
            plan: the plan as it was made.
            pages_in_use: pages in use during the step; a request that finished in it has freed its pages by now.
            times: timestamps of the step.
            accepted: the number of accepted draft tokens.
            compiles: graphs compiled so far.
            kernel_seconds: time in compiled code; None if unknown.
        """
        noting = self._clock()
        cost = self._cost(((s.start, s.length) for s in plan.spans), sum(s.num_logits for s in plan.spans))
        now = self._clock()
        event = Stepped(
            now,
            step=plan.step,
            phase=plan.phase,
            requests=len(plan.spans),
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decode_tokens - plan.num_draft_tokens + accepted,
            pages_used=sum(count for count, _ in pages_in_use),
            kv_bytes=sum(count * size for count, size in pages_in_use),
            wall_seconds=now - times.start,
            forward_seconds=times.computed - times.planned,
            telemetry_seconds=self._seconds + now - noting,
            predicted_flops=cost.flops,
            predicted_bytes=cost.bytes,
            pages_idle=sum(len(pool.evictable) for pool, _ in self._pools),
            compiles=compiles,
            context_tokens=sum(span.end for span in plan.spans),
            drafted_tokens=plan.num_draft_tokens,
            accepted_tokens=accepted,
            draft_seconds=times.draft_seconds,
            kernel_seconds=kernel_seconds,
            padding_rows=plan.padding_rows,
        )
        self._seconds = 0.0
        if self.listener is not None:
            self._call_listener(event)
        return event


def recorded(decision: SchedulerDecision) -> RecordedDecision:
    """Return a plan's decision with request ids in place of requests; a turn with an invalid limit gets the limit
    -1.
    """
    order: list[tuple[str, int | None]] = []
    for item in decision.order:
        if isinstance(item, RunningViews):
            order += [(sequence.request_id, None) for sequence in item.sequences]
        elif isinstance(item, Turn):
            order.append((item.request.request_id, item.max_tokens if type(item.max_tokens) is int else -1))
        elif isinstance(item, RequestView):
            order.append((item.request_id, None))
    keep, preempted = (
        tuple([entry.request_id for entry in entries or ()]) for entries in (decision.keep, decision.preempted)
    )
    return RecordedDecision(tuple(order), keep, preempted, tuple(decision.reasons.items()))
