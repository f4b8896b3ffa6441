"""What the runner tells of itself: every event to whoever listens, and each step with what it should have cost."""

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
    """When a step began, and when it was planned and computed; `drafting` are the seconds that proposing took."""

    began: float
    drafting: float
    planned: float
    computed: float


class Instruments:
    """`listener` receives every event; the time that takes is measured, and told with the step. What it raises is kept
    until the work is done that it was told of: `raise_kept`."""

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
        self._seconds = 0.0  # what listening has taken since the last step was told
        self._kept: BaseException | None = None

    def tell(self, event: Event) -> None:
        if self.listener is not None:
            began = self._clock()
            self._hear(event)
            self._seconds += self._clock() - began

    def raise_kept(self) -> None:
        """Raise the first error of the listener since this was last asked."""
        kept, self._kept = self._kept, None
        if kept is not None:
            raise kept

    def _hear(self, event: Event) -> None:
        assert self.listener is not None
        try:
            self.listener(event)
        except BaseException as error:  # in the midst of a step it would leave the others' tokens untold
            self._kept = self._kept or error

    def formed(self, plan: StepPlan, began: float) -> None:
        """Tell the listener what the step that began then is to compute, and what the policy wished."""
        if self.listener is None:
            return
        noting = self._clock()
        spans = tuple(SpanNote(s.sequence.request_id, s.start, s.length, len(s.drafts)) for s in plan.spans)
        asked = tuple(Ask(tuple(w.tokens), tuple(w.set_back), tuple(w.because.items())) for w in plan.wishes)
        self._hear(Formed(began, step=plan.step, spans=spans, asked=asked))
        self._seconds += self._clock() - noting

    def held(self) -> list[tuple[int, int]]:
        """Pages in use and bytes a page, by layer group."""
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
        """Tell the listener of a whole step, and give the event: it lasted from `times.began` until now.

        `held` is what the step computed on: a request that ends in it has given its pages back by now. `accepted` of
        its drafted tokens stand.
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
