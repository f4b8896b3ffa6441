"""Emit events to the listener, and each step with its predicted cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.cache.pages import PagePool
from workbench.cache.store import KVStore
from workbench.engine.plan import StepPlan
from workbench.model.cost import StepCost
from workbench.model.transformer import Transformer
from workbench.trace.events import Ask, Event, Formed, SpanNote, Stepped


@dataclass(frozen=True)
class StepTimes:
    """The times at which a step began, was planned and was computed, and the seconds spent on drafting."""

    began: float
    drafting: float
    planned: float
    computed: float


class Instruments:
    """Telemetry of a runner: `listener` receives every event, and its time is measured and reported with the step.

    Errors of the listener are kept until the present work is done: `raise_listener_error`.
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
        self._cost = StepCost(model.spec, *model.value_bytes, store.value_bytes)
        self._pools = [(pool, store.page_bytes(table)) for table, pool in enumerate(pools)]
        self._seconds = 0.0  # the listener's time since the last step
        self._kept: BaseException | None = None

    def tell(self, event: Event) -> None:
        if self.listener is not None:
            began = self._clock()
            self._hear(event)
            self._seconds += self._clock() - began

    def raise_kept(self) -> None:
        """Raise the first error of the listener since the last call."""
        kept, self._kept = self._kept, None
        if kept is not None:
            raise kept

    def _hear(self, event: Event) -> None:
        assert self.listener is not None
        try:
            self.listener(event)
        except BaseException as error:  # within a step it would lose other requests' events
            self._kept = self._kept or error

    def formed(self, plan: StepPlan, began: float) -> None:
        """Emit StepPlanned: the spans of the step and the policy's decisions."""
        if self.listener is None:
            return
        noting = self._clock()
        spans = tuple(SpanNote(s.sequence.request_id, s.start, s.length, len(s.drafts)) for s in plan.spans)
        asked = tuple(Ask(tuple(w.tokens), tuple(w.set_back), tuple(w.because.items())) for w in plan.wishes)
        self._hear(Formed(began, step=plan.step, spans=spans, asked=asked))
        self._seconds += self._clock() - noting

    def held(self) -> list[tuple[int, int]]:
        """Return (pages in use, bytes per page) by cache group."""
        return [(pool.used, size) for pool, size in self._pools]

    def step(
        self,
        plan: StepPlan,
        held: list[tuple[int, int]],
        times: StepTimes,
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
        cost = self._cost(((s.start, s.length) for s in plan.spans), sum(s.logit_rows for s in plan.spans))
        now = self._clock()
        event = Stepped(
            now,
            step=plan.step,
            phase=plan.phase,
            requests=len(plan.spans),
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decode_tokens - plan.drafts + accepted,
            pages_used=sum(count for count, _ in held),
            kv_bytes=sum(count * size for count, size in held),
            wall_seconds=now - times.began,
            forward_seconds=times.computed - times.planned,
            note_seconds=self._seconds + now - noting,
            predicted_flops=cost.flops,
            predicted_bytes=cost.bytes,
            pages_idle=sum(len(pool.idle) for pool, _ in self._pools),
            compiles=compiles,
            context_tokens=sum(span.end for span in plan.spans),
            drafted_tokens=plan.drafts,
            accepted_tokens=accepted,
            draft_seconds=times.drafting,
            kernel_seconds=kernel_seconds,
            padding_rows=plan.padding,
        )
        self._seconds = 0.0
        if self.listener is not None:
            self._hear(event)
        return event
