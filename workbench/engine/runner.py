"""The runner: requests in, events out, one step at a time.

A step reads as a sentence: plan, pack and forward, choose, commit, note. One thread owns a runner.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from workbench.cache.pages import PagePool
from workbench.cache.store import KVStore
from workbench.engine import intake
from workbench.engine.executors import Unit, executor_for
from workbench.engine.instruments import Instruments
from workbench.engine.lanes import Lanes
from workbench.engine.output import Output
from workbench.engine.plan import StepPlan
from workbench.engine.scheduler import Limits, Scheduler
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import FinishReason, Request, Sequence
from workbench.sampling.choose import Choice, Chooser
from workbench.trace.events import Decoded, Event, Finished, Planned, Prefilled, SetBack, Submitted


class Runner:
    """A model, its cache and its requests. `note` receives every event (see `instruments`)."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        limits: Limits | None = None,
        page_size: int = 64,
        pages: int = 256,
        cache_dtype: torch.dtype | None = None,
        page_orders: tuple[list[int], ...] | None = None,
        overflow: Literal["refuse", "cut_oldest"] = "refuse",
        note: Callable[[Event], None] | None = None,
        lanes: Lanes | None = None,
        compile: Unit = "block",
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """`page_orders` gives, for each layer group, the order in which its pages are first used; `lanes` says
        which lane decodes where that is not the model's; `compile` is the lane inductor's unit."""
        self.model, self.tokenizer = model, tokenizer
        if tokenizer is not None:
            tokenizer.check_fits(model.spec.vocab)
        tables = len(model.spec.layer_groups)
        dtype = cache_dtype or model.dtype
        self.store = KVStore(model.cache_shapes(), (pages,) * tables, page_size, dtype, str(model.device))
        orders = page_orders or (None,) * tables
        pools = tuple(PagePool(pages, page_size, order) for order in orders)
        self.scheduler = Scheduler(pools, limits or Limits(), model.spec.context)
        self.lanes = lanes or Lanes.one(model.lane, "the model's")
        self.executor = executor_for(model, self.store, self.lanes, compile)
        self.chooser = Chooser(model.spec.vocab)
        self.overflow = overflow
        self.clock, self._sleep = clock, sleep
        self.instruments = Instruments(model, self.store, pools, clock, note)
        self._sequences: dict[str, Sequence] = {}
        self._outputs: dict[str, Output] = {}
        self._mail: dict[str, deque[Event]] = {}  # for each request, the box of the stream that asked
        self._submitted = 0
        self._names = (f"request-{number}" for number in itertools.count())

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def stream(self, requests: intake.Asked, **sampling: object) -> Iterator[Event]:
        """Run `requests` (a text, a Request, or several of either) and yield what happens as it happens.

        `sampling` are SamplingParameters for requests given as text. What a bad request gets is a Finished
        event with reason "refused"; a lone text that cannot run raises. Closing the iterator cancels the rest.
        """
        asked = intake.requests_from(requests, self.tokenizer, sampling, self._names)
        return self._stream(asked, raises=isinstance(requests, str))

    def _stream(self, asked: list[Request], raises: bool) -> Iterator[Event]:
        began = self.clock()
        coming = deque(sorted(asked, key=intake.due))
        owed = 0  # requests submitted whose end is still to come
        box: deque[Event] = deque()
        try:
            while coming or owed:
                while coming and began + intake.due(coming[0]) <= self.clock():
                    self.submit(request := coming.popleft(), box, began + request.arrival)
                    owed += 1
                if owed and not box:
                    self.step(box)
                elif not box:
                    self._sleep(max(0.0, min(0.01, began + coming[0].arrival - self.clock())))
                while box:
                    event = box.popleft()
                    if isinstance(event, Finished):
                        owed -= 1
                        if raises and event.reason == FinishReason.REFUSED:
                            raise WorkbenchError(event.error)
                    yield event
        finally:
            for request_id in [name for name, owner in self._mail.items() if owner is box]:
                self.cancel(request_id)

    def submit(self, request: Request, box: deque[Event] | None = None, arrival: float | None = None) -> None:
        """Queue `request`; its events go to `box` and to the instruments. One that cannot run ends at once, refused."""
        now, box = self.clock(), box if box is not None else deque()
        begin_ids = self.tokenizer.begin_ids if self.tokenizer is not None else ()
        request = intake.fit(request, self.model.spec.context, self.overflow, begin_ids)
        name, arrival = request.request_id, now if arrival is None else arrival
        submitted = Submitted(
            now, name, prompt_tokens=len(request.prompt_ids), arrival=arrival, cut_tokens=request.cut_tokens
        )
        if name in self._sequences:
            refused = f"request id {name!r} is already taken; ids must differ"
            for event in (submitted, Finished(now, name, reason=str(FinishReason.REFUSED), error=refused)):
                self.instruments.tell(event)
                box.append(event)
            return
        sequence = Sequence.of(request, self._submitted)
        self._submitted += 1
        self._sequences[name], self._mail[name] = sequence, box
        self._emit(submitted)
        try:
            self._admit(sequence)
        except Exception as error:  # whatever is wrong with one request is no matter of the others'
            sequence.finish_reason = FinishReason.REFUSED
            self._end(sequence, FinishReason.REFUSED, _told(error))

    def _admit(self, sequence: Sequence) -> None:
        request, spec = sequence.request, self.model.spec
        intake.check(request, spec.vocab)
        self._outputs[request.request_id] = Output(request, self.tokenizer, spec.end_ids, spec.context)
        self.chooser.admit(sequence)
        self.scheduler.submit(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request now, whatever it is doing; its pages are free when this returns. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.CANCELLED)

    def step(self, box: deque[Event] | None = None) -> None:
        """Compute one step. Events about the whole step go to `box`, those of a request to its own."""
        began = self.clock()
        plan = self.scheduler.plan()
        if plan is None:
            return
        planned, held = self.clock(), self.instruments.held()
        self._tell_decisions(plan, planned)
        try:
            logits = self.executor.forward(plan)
            computed = self.clock()
            choices = self._choose(logits, plan)
        except Exception as error:  # the requests of this step end with it; those that waited go on
            computed = self.clock()
            for span in plan.spans:
                self._finish(span.sequence, FinishReason.ERROR, _told(error))
        else:
            self._commit(plan, choices, self.clock())
        compiles, kernels = self.executor.compiles, self.executor.kernel_seconds
        stepped = self.instruments.step(plan, held, began, planned, computed, compiles, kernels)
        if box is not None:
            box.append(stepped)

    def _choose(self, logits: Tensor, plan: StepPlan) -> dict[str, Choice]:
        sampled = [span.sequence for span in plan.spans if span.samples]
        chosen = self.chooser.choose(logits, sampled) if sampled else []
        return {sequence.request_id: choice for sequence, choice in zip(sampled, chosen, strict=True)}

    def _tell_decisions(self, plan: StepPlan, now: float) -> None:
        for decision in plan.decisions:
            name, action, reason = decision.request_id, decision.action, decision.reason
            if action == "set_back":
                self._emit(SetBack(now, name, step=plan.step, reason=reason))
            else:
                self._emit(Planned(now, name, step=plan.step, action=action, reason=reason))

    def _commit(self, plan: StepPlan, choices: dict[str, Choice], now: float) -> None:
        self.scheduler.commit(plan, {name: c.token_id for name, c in choices.items() if not c.error})
        for span in plan.spans:
            sequence, name = span.sequence, span.sequence.request_id
            if not span.decodes:
                self._emit(Prefilled(now, name, step=plan.step, tokens=span.length, computed=span.end))
            if name in choices and sequence.finish_reason is None:  # a listener may have cancelled it
                self._decoded(sequence, choices[name], plan.step, now)

    def _decoded(self, sequence: Sequence, choice: Choice, step: int, now: float) -> None:
        if choice.error:
            self._finish(sequence, FinishReason.ERROR, choice.error)
            return
        try:
            text, reason = self._outputs[sequence.request_id].push(choice.token_id, sequence)
        except Exception as error:  # an id, say, that the model has and the tokenizer lacks
            self._finish(sequence, FinishReason.ERROR, _told(error))
            return
        self._emit(
            Decoded(
                now, sequence.request_id, text, step=step, token_id=choice.token_id,
                index=len(sequence.output_ids) - 1, logprob=choice.logprob, top_logprobs=choice.top_logprobs,
            )
        )  # fmt: skip
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        if sequence.finish_reason is not None:
            return
        freed = self.scheduler.finish(sequence, reason)
        if reason is FinishReason.ERROR:
            for table, pages in enumerate(freed):
                self.store.scrub(table, pages)
        self._end(sequence, reason, error)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str) -> None:
        name = sequence.request_id
        output = self._outputs.pop(name, None)
        rest = output.finish() if output is not None else ""
        self._emit(
            Finished(
                self.clock(), name, rest, reason=str(reason), error=error, token_ids=tuple(sequence.output_ids),
                output_text=output.text if output is not None else "", prompt_tokens=sequence.prompt_length,
            )
        )  # fmt: skip
        self.chooser.forget(name)
        del self._sequences[name], self._mail[name]

    def _emit(self, event: Event) -> None:
        self.instruments.tell(event)
        if event.request_id in self._mail:
            self._mail[event.request_id].append(event)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"


def generate(runner: Runner, requests: Iterable[Request]) -> dict[str, Finished]:
    """Run to the end and keep only how each request finished, by its id."""
    return {event.request_id: event for event in runner.stream(list(requests)) if isinstance(event, Finished)}
