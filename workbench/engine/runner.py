"""The runner: requests in, events out, one step at a time.

A step reads as a sentence: plan, pack and forward, choose, commit, note. One thread owns a runner.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.cache.format import CacheFormat
from workbench.cache.holdings import Holdings
from workbench.cache.host import carry_out, host_pages
from workbench.cache.pages import PagePool
from workbench.cache.prefix import PrefixIndex
from workbench.cache.settings import RadixPrefix, offload_from, prefix_from
from workbench.cache.store import KVStore
from workbench.cache.tables import tables_of
from workbench.engine import intake
from workbench.engine.executors import Unit, executor_for
from workbench.engine.inspection import Inspection, inspect
from workbench.engine.instruments import Instruments
from workbench.engine.lanes import Lanes
from workbench.engine.mail import Mail
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
        pages: int | tuple[int, ...] = 256,
        cache: CacheFormat | None = None,
        cache_dtype: torch.dtype | None = None,
        page_orders: tuple[list[int], ...] | None = None,
        prefix: Any = "off",
        offload: Any = "none",
        overflow: Literal["refuse", "cut_oldest"] = "refuse",
        note: Callable[[Event], None] | None = None,
        lanes: Lanes | None = None,
        compile: Unit = "block",
        batch_invariant: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """`pages` are those of each table, or of all alike; `cache` says how keys and values are kept, `cache_dtype` in
        what type where they are not packed (the model's unless given); `page_orders` gives, for each table, the order
        in which its pages are first used; `prefix` and `offload` are values of `cache.settings` or their kinds; `lanes`
        says which lane decodes where that is not the model's; `compile` is the lane inductor's unit; `batch_invariant`
        as in `load`."""
        self.model, self.tokenizer = model, tokenizer
        if tokenizer is not None:
            tokenizer.check_fits(model.spec.vocab)
        shapes = model.cache_shapes(cache)
        tables = len(tables_of(shape.tables for shape in shapes))
        dtype = cache_dtype or model.dtype
        counts = (pages,) * tables if isinstance(pages, int) else pages
        self.store = KVStore(shapes, counts, page_size, dtype, str(model.device))
        orders = page_orders or (None,) * tables
        pools = tuple(PagePool(count, page_size, order) for count, order in zip(counts, orders, strict=True))
        limits, reuse = limits or Limits(), prefix_from(prefix)
        ttl = reuse.ttl if isinstance(reuse, RadixPrefix) else None
        self.host = host_pages(self.store, offload_from(offload))
        rooms = self.host.rooms if self.host is not None else ()
        index = PrefixIndex(pools, self.store.tables, ttl, clock, rooms) if isinstance(reuse, RadixPrefix) else None
        holdings = Holdings(pools, self.store.tables, limits.max_num_batched_tokens, index, rooms)
        self.scheduler = Scheduler(holdings, limits, model.spec.context)
        self.lanes = lanes or Lanes.one(model.lane, "the model's")
        self.executor = executor_for(model, self.store, self.lanes, compile, batch_invariant)
        self.chooser = Chooser(model.spec.vocab)
        self.overflow = overflow
        self.clock, self._sleep = clock, sleep
        self.instruments = Instruments(model, self.store, pools, clock, note)
        self._sequences: dict[str, Sequence] = {}
        self._outputs: dict[str, Output] = {}
        self._mail = Mail(self.instruments.tell)
        self._submitted = 0
        self._names = (f"request-{number}" for number in itertools.count())

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def stream(self, requests: intake.Asked, **sampling: object) -> Iterator[Event]:
        """Run `requests` (a text, a Request, or several of either) and yield what happens as it happens.

        `sampling` are SamplingParameters for requests given as text. What a bad request gets is a Finished
        event with reason "refused"; a lone text that cannot run raises. Closing the iterator cancels the rest.
        With n > 1 each sample has events of its own: the request's id, and the sample's number.
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
                    owed += self.submit(request := coming.popleft(), box, began + request.arrival)
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
            for name in self._mail.names(box):
                self.cancel(name)

    def submit(self, request: Request, box: deque[Event] | None = None, arrival: float | None = None) -> int:
        """Queue `request`; its events go to `box` and to the instruments. One that cannot run ends at once, refused.

        Returns how many Finished events are to come, or came: one a sample.
        """
        now, box = self.clock(), box if box is not None else deque()
        begin_ids = self.tokenizer.begin_ids if self.tokenizer is not None else ()
        request = intake.fit(request, self.model.spec.context, self.overflow, begin_ids)
        arrival = now if arrival is None else arrival
        samples = intake.samples_of(request)
        taken = next((sample.request_id for sample in samples if sample.request_id in self._sequences), None)
        if taken is not None:
            refused = f"request id {taken!r} is already taken; ids must differ"
            end = Finished(now, request.request_id, reason=str(FinishReason.REFUSED), error=refused)
            for event in (_submitted(request, now, arrival), end):
                self.instruments.tell(event)
                box.append(event)
            return 1
        sequences = []
        for number, sample in enumerate(samples):
            sequence = Sequence.of(sample, self._submitted)
            self._submitted += 1
            sequences.append(sequence)
            self._sequences[sample.request_id] = sequence
            self._mail.open(sample.request_id, box, (request.request_id, number) if len(samples) > 1 else None)
            self._mail.send(_submitted(sample, now, arrival))
        try:
            self._admit(sequences)
        except Exception as error:  # whatever is wrong with one request is no matter of the others'
            for sequence in sequences:
                sequence.finish_reason = FinishReason.REFUSED
                self._end(sequence, FinishReason.REFUSED, _told(error))
        return len(samples)

    def _admit(self, sequences: list[Sequence]) -> None:
        spec = self.model.spec
        intake.check(sequences[0].request, spec.vocab)
        for sequence in sequences:
            self._outputs[sequence.request_id] = Output(sequence.request, self.tokenizer, spec.end_ids, spec.context)
            self.chooser.admit(sequence)
        self.scheduler.submit(sequences[0], sequences[1:])

    def cancel(self, request_id: str) -> None:
        """End a request now, with all its samples, whatever it is doing; its pages are free when this returns.
        Unknown ids are ignored."""
        for name in reversed(self._mail.samples(request_id)):
            sequence = self._sequences.get(name)
            if sequence is not None:
                self._finish(sequence, FinishReason.CANCELLED)

    def forget_prefixes(self) -> None:
        """Give up every page that is kept for later requests; what runs keeps its own."""
        if (index := self.scheduler.holdings.prefix) is not None:
            index.clear()

    def inspect(
        self,
        request_id: str,
        rows: Iterable[int] = (-1,),
        *,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        hidden: Iterable[int] | None = None,
    ) -> Inspection:
        """Attention weights and hidden states of a request that is being served, for the positions `rows` of its text
        (negative ones from the last computed): recomputed from the cache's pages, and costing nothing until then.

        `layers` and `heads` choose the weights (all unless given, none for `()`), `hidden` the blocks before which
        hidden states are wanted, the number of layers for what leaves the last. WorkbenchError for what is missing."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            known = ", ".join(self._sequences) or "none"
            raise WorkbenchError(f"request {request_id!r} is not being served; served now: {known}")
        asked = (None if each is None else tuple(each) for each in (layers, heads, hidden))
        return inspect(self.model, self.store, sequence, tuple(rows), *asked)

    def step(self, box: deque[Event] | None = None) -> None:
        """Compute one step. Events about the whole step go to `box`, those of a request to its own."""
        began = self.clock()
        plan = self.scheduler.plan()
        if plan is None:
            return
        plan, faults = self._moved(plan)
        planned, held = self.clock(), self.instruments.held()
        self._tell_decisions(plan, planned)
        for sequence, fault in faults:
            self._finish(sequence, FinishReason.ERROR, fault)
        if not plan.spans:
            return
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

    def _moved(self, plan: StepPlan) -> tuple[StepPlan, list[tuple[Sequence, str]]]:
        """The plan once its pages are where they should be, less the requests whose pages could not be had, and why."""
        if not plan.moves:
            return plan, []
        faults = carry_out(plan.moves, self.store, self.host)
        missing = {(table, page): faults[name] for name, table, _, page in plan.moves.loads if name in faults}
        broken = []
        for sequence in self.scheduler.running if missing else ():
            mine = ((table, page) for table, pages in enumerate(sequence.pages) for page in pages)
            fault = next((missing[place] for place in mine if place in missing), None)
            if fault is not None:
                broken.append((sequence, fault))
        return plan.without([sequence for sequence, _ in broken]), broken

    def _choose(self, logits: Tensor, plan: StepPlan) -> dict[str, Choice]:
        sampled = [span.sequence for span in plan.spans if span.samples]
        chosen = self.chooser.choose(logits, sampled) if sampled else []
        return {sequence.request_id: choice for sequence, choice in zip(sampled, chosen, strict=True)}

    def _tell_decisions(self, plan: StepPlan, now: float) -> None:
        for decision in plan.decisions:
            name, action, reason = decision.request_id, decision.action, decision.reason
            if action == "set_back":
                self._mail.send(SetBack(now, name, step=plan.step, reason=reason))
            else:
                self._mail.send(Planned(now, name, step=plan.step, action=action, reason=reason))

    def _commit(self, plan: StepPlan, choices: dict[str, Choice], now: float) -> None:
        self.scheduler.commit(plan, {name: c.token_id for name, c in choices.items() if not c.error})
        for span in plan.spans:
            sequence, name = span.sequence, span.sequence.request_id
            if not span.decodes:
                self._mail.send(Prefilled(now, name, step=plan.step, tokens=span.length, computed=span.end))
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
        self._mail.send(
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
        self._mail.send(
            Finished(
                self.clock(), name, rest, reason=str(reason), error=error, token_ids=tuple(sequence.output_ids),
                output_text=output.text if output is not None else "", prompt_tokens=sequence.prompt_length,
                cached_tokens=sequence.cached_tokens, computed_tokens=sequence.computed_tokens,
                restored_tokens=sequence.restored_tokens, shared_pages=sequence.shared_pages,
            )
        )  # fmt: skip
        self.chooser.forget(name)
        self._mail.close(name)
        del self._sequences[name]


def _submitted(request: Request, now: float, arrival: float) -> Submitted:
    prompt, cut = len(request.prompt_ids), request.cut_tokens
    return Submitted(now, request.request_id, prompt_tokens=prompt, arrival=arrival, cut_tokens=cut)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"


def generate(runner: Runner, requests: Iterable[Request]) -> dict[str, Finished]:
    """Run to the end and keep only how each request finished, by its id; of several samples, `id`, `id#1`, ..."""
    ends = (event for event in runner.stream(list(requests)) if isinstance(event, Finished))
    return {intake.sample_name(event.request_id, event.sample): event for event in ends}
