"""Run requests: text in, events out, one step at a time.

A step reads as a sentence: propose, plan, pack and forward, sample, commit, emit. One thread owns a runner.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from workbench.cache.format import CacheFormat
from workbench.engine import intake, runner_shown
from workbench.engine.apart import forward_apart, rows_of
from workbench.engine.books import Books
from workbench.engine.cache import Cache
from workbench.engine.contention import StepThreads
from workbench.engine.drafts import Drafts
from workbench.engine.excluded import excluded
from workbench.engine.executors import Unit, evicting, executor_for
from workbench.engine.inspection import Inspection, inspect
from workbench.engine.instruments import Instruments, StepTimes
from workbench.engine.interrupts import HeldBack
from workbench.engine.lanes import Lanes
from workbench.engine.owner import Owner
from workbench.engine.plan import StepPlan
from workbench.engine.reading import Read
from workbench.engine.schedule import SetBack, policy_from
from workbench.engine.scheduler import Limits, Scheduler
from workbench.engine.served import Served
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import FinishReason, Request
from workbench.sampling.choose import Chooser
from workbench.sampling.verify import Draft
from workbench.shown import Shown, Table
from workbench.trace.events import Event, Finished, ThreadsChanged


class Runner(Shown):
    """A model, its KV cache and its requests. The listener receives every event (see `telemetry`)."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        limits: Limits | None = None,
        policy: Any = "fcfs",
        set_back: SetBack = "auto",
        page_size: int = 64,
        pages: int | tuple[int, ...] = 256,
        cache: CacheFormat | None = None,
        cache_dtype: torch.dtype | None = None,
        page_orders: tuple[list[int], ...] | None = None,
        prefix: Any = "off",
        offload: Any = "none",
        evict: Any = None,
        overflow: Literal["refuse", "cut_oldest"] = "refuse",
        note: Callable[[Event], None] | None = None,
        lanes: Lanes | None = None,
        compile: Unit = "block",
        batch_invariant: bool = False,
        drafts: Drafts | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Create a runner around a loaded model.

        Args:
            model: the model to run.
            tokenizer: its tokenizer; None if requests are token ids.
            limits: the most sequences and tokens of a step.
            policy: the scheduling policy: a name or setting, or a function from SchedulerState to SchedulerDecision.
            preemption_mode: whether pages of preempted sequences are recomputed or offloaded.
            page_size: tokens per page.
            pages: pages of each cache group, or of all alike.
            cache: format of keys and values.
            cache_dtype: type of what is not quantized; the model's unless given.
            page_orders: for each cache group, the order in which its pages are first used.
            prefix: prefix cache setting, or its kind.
            offload: offload setting, or its kind.
            evict: eviction policy, or its settings.
            overflow: refuse prompts that leave no room in the context, or cut their oldest tokens.
            listener: receives every event.
            backends: backends of decodes, other steps and attention; the model's unless given.
            compile: what Inductor compiles at once.
            batch_invariant: as in `load`.
            speculator: proposes tokens that a step verifies besides.
            clock: returns seconds.
            sleep: waits for arrivals.
        """
        self.model, self.tokenizer = model, tokenizer
        if tokenizer is not None:
            tokenizer.check_fits(model.spec.vocab)
        limits = limits or Limits()
        self.clock, self._sleep, self.now = clock, sleep, 0.0
        self.cache = Cache.of(
            model, limits.chunk, lambda: self.now, page_size=page_size, pages=pages, cache=cache,
            cache_dtype=cache_dtype, page_orders=page_orders, prefix=prefix, offload=offload, evict=evict,
            set_back=set_back,
        )  # fmt: skip
        self.store = self.cache.store
        self.scheduler = Scheduler(self.cache.holdings, limits, model.spec.context, policy_from(policy))
        self.lanes = lanes or Lanes.one(model.lane, "the model's")
        self._changes: list[tuple[int, str]] = []  # of threads, in the step under way
        threads = StepThreads(lambda *change: self._changes.append(change))
        fast = executor_for(model, self.store, self.lanes, compile, batch_invariant, self._fell_back, threads)
        self.executor = evicting(model, self.store, self.lanes, fast, self.cache.evictor, self._fell_back)
        chooser = Chooser(model.spec.vocab)
        self.instruments = Instruments(model, self.store, self.scheduler.pools, clock, note)
        tell = self.instruments.tell
        self.served = Served(model.spec, tokenizer, self.scheduler, self.cache, chooser, tell, clock)
        self.books = Books(lambda: bool(self.served.noted), self.served.heed, self.instruments.raise_kept)
        self.drafts: Drafts | None = None
        self.speculate(drafts)
        self.overflow = overflow
        self.owner: Owner | None = None
        self.asked: Mapping[str, Any] = {}  # the arguments of `load`
        self._names = (f"request-{number}" for number in itertools.count())

    def _fell_back(self, why: str) -> None:
        self.lanes = self.lanes.on_eager(why)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @intake.takes_sampling
    def stream(self, requests: intake.Asked, **sampling: object) -> Iterator[Event]:
        """Run `requests` (a text, a Request, or several of either) and yield events as they happen.

            for event in runner.stream("def fib(n):", max_tokens=32, temperature=0):
                print(event.text, end="")

        A bad request gets a Finished event with reason "refused"; a lone text that cannot run raises. Closing the
        iterator cancels the rest, and so does an interrupt (Ctrl-C, a notebook's stop button): the runner goes on with
        the next. With n > 1 each sample has events of its own: the request's id, and the sample's number. Those of
        best_of > n come when all have finished, those of beams when the search has: samples 0 to n - 1 are the best.

        Args:
            requests: what to run.
            sampling: SamplingParameters for requests given as text.
        """
        if self.owner is not None and not self.owner.here():
            return self.owner.stream(requests, **sampling)
        return self._stream(self.read(requests, sampling), raises=isinstance(requests, str))

    def read(self, requests: intake.Asked, sampling: dict[str, Any]) -> list[Request]:
        """Return `requests` as Requests, in the given order; texts are encoded and get an id."""
        return intake.requests_from(requests, self.tokenizer, sampling, self._names)

    def _stream(self, asked: list[Request], raises: bool) -> Iterator[Event]:
        began = self.clock()
        coming = deque(sorted(asked, key=intake.due))
        owed = 0  # submitted samples that have not finished
        box: deque[Event] = deque()
        try:
            while coming or owed:
                while coming and began + intake.due(coming[0]) <= self.clock():
                    owed += self.submit(request := coming.popleft(), box, began + intake.due(request))
                if owed and not box:
                    self.step(box)
                elif not box:
                    self._sleep(max(0.0, min(0.01, began + intake.due(coming[0]) - self.clock())))
                while box:
                    event = box.popleft()
                    if isinstance(event, Finished):
                        owed -= 1
                        if raises and event.reason == FinishReason.REFUSED:
                            raise WorkbenchError(event.error)
                    yield event
        finally:
            self.cancel_all(box)

    def submit(self, request: Request, box: deque[Event] | None = None, arrival: float | None = None) -> int:
        """Queue `request`. Its events go to `queue` and to the listener. One that cannot run is refused at once.

        Returns:
            the number of Finished events to expect: one per sample.
        """
        self._check_owner()
        begin_ids = self.tokenizer.begin_ids if self.tokenizer is not None else ()
        request = intake.fit(request, self.model.spec.context, self.overflow, begin_ids)
        with self.books.open():
            return self.served.submit(request, box if box is not None else deque(), arrival)

    def cancel(self, request_id: str) -> None:
        """End a request now, with all its samples; its pages are free when this returns. Unknown ids are ignored.

        It may be called at any moment, by another thread or a timer too. Within a step (by a listener, say) it returns
        at once, and the step ends the request before it emits more of its events.
        """
        self._check_owner()
        self._cancel(request_id)

    def cancel_all(self, box: deque[Event]) -> None:
        """Cancel every request whose events go to `queue`."""
        self._check_owner()
        self._cancel(*self.served.of(box))

    def _cancel(self, *request_ids: str) -> None:
        with HeldBack():
            self.served.noted += request_ids
            self.books.settle()

    def speculate(self, drafts: Drafts | None) -> None:
        """Verify tokens proposed by `speculator` from the next step on; None switches speculation off."""
        if drafts is not None and self.cache.evictor is not None:
            raise WorkbenchError(excluded(False, True, True))
        if self.drafts is not None:
            self.drafts.clear()
        self.drafts = drafts
        self.served.chooser.accept = drafts.accept if drafts is not None else "rejection"

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; running sequences keep their pages."""
        self.cache.forget_prefixes()

    def inspect(
        self,
        request_id: str,
        rows: Iterable[int] = (-1,),
        *,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        hidden: Iterable[int] | None = None,
    ) -> Inspection:
        """Return attention weights and hidden states of a request in progress.

        They are recomputed from the cache's pages, and cost nothing until then.

            runner.inspect(event.request_id, rows=range(8), layers=(0,))  # its value is shown as pictures

        Args:
            request_id: the request.
            positions: positions in its text; negative ones count from the last computed.
            layers: layers whose weights are wanted; all unless given, none for `()`.
            heads: heads whose weights are wanted; all unless given.
            hidden_states: blocks before which states are wanted; the number of layers for the output of the last.

        Raises:
            WorkbenchError: for what is missing.
        """
        sequence = self.served.sequences.get(request_id)
        if sequence is None:
            known = ", ".join(self.served.sequences) or "none"
            raise WorkbenchError(f"request {request_id!r} is not being served; served now: {known}")
        asked = (None if each is None else tuple(each) for each in (layers, heads, hidden))
        return inspect(self.model, self.store, sequence, tuple(rows), *asked)

    def step(self, box: deque[Event] | None = None) -> None:
        """Run one step: propose, plan, forward, sample, commit, emit.

        Events about the whole step go to `queue`, those of a request to its own queue. An interrupt takes effect while
        the model computes, and then no request has advanced, or when the step is over.
        """
        self._check_owner()
        with self.books.open() as held:
            self._step(box, held)

    def _step(self, box: deque[Event] | None, held: HeldBack) -> None:
        began = self.now = self.clock()  # one time per step, so that TTLs are the same in a replay
        proposed = self._propose()
        drafted = self.clock()
        plan = self.scheduler.plan({name: draft.token_ids for name, draft in proposed.items()})
        if plan is None:
            return
        self.instruments.formed(plan, began)
        plan, faults = self.cache.move(plan, itertools.chain(self.scheduler.running, self.scheduler.waiting))
        planned, pages = self.clock(), self.instruments.held()
        self.served.planned(plan, planned)
        for sequence, fault in (*plan.faults, *faults):
            self.served.broke([sequence], fault)
        plan = plan.going()
        if not plan.spans:
            return
        whole, accepted = plan, 0
        try:
            with held.let_through():
                logits = self.executor.forward(plan)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("within a step, which is as if it had not begun") from None  # not fifty lines
        except Exception:
            with held.let_through():
                plan, logits, broken = forward_apart(self.executor.forward, plan)
            for sequence, error in broken:
                self.served.broke([sequence], error)
        self.served.heed()
        going = plan.going()
        if len(going.spans) < len(plan.spans):  # cancelled while the model computed
            plan, logits = going, rows_of(plan, going, logits)
        computed = self.clock()
        try:
            choices = self.served.choose(logits, plan, proposed)
        except Exception as error:  # the requests of this step fail; waiting ones go on
            self.served.broke([span.sequence for span in plan.spans], error)
        else:
            now = self.clock()
            read = self.served.read(choices)
            accepted = self._commit(plan, read)
            self.served.computed(plan, read, now)
        times = StepTimes(began, drafted - began, planned, computed)
        compiles, kernels = self.executor.compiles, self.executor.kernel_seconds
        for threads, reason in self._changes:
            self.instruments.tell(ThreadsChanged(self.clock(), step=plan.step, threads=threads, reason=reason))
        self._changes.clear()
        stepped = self.instruments.step(whole, pages, times, accepted, compiles, kernels)
        if box is not None:
            box.append(stepped)

    def __repr__(self) -> str:
        return f"<Runner {runner_shown.headline(self)}>"

    def _shown(self) -> Table:
        return runner_shown.table(self)

    def _check_owner(self) -> None:
        if self.owner is not None and self.owner.elsewhere():
            raise WorkbenchError("another thread owns this runner: use runner.stream, or widgets.Live.of(runner).call")

    def _propose(self) -> dict[str, Draft]:
        """Return draft tokens to verify in the next step."""
        if self.drafts is None:
            return {}
        try:
            return self.drafts.propose(self.scheduler.running)
        except Exception as error:  # running requests cannot go on as asked; waiting ones can
            self.served.broke(list(self.scheduler.running), error)
            return {}

    def _commit(self, plan: StepPlan, read: Mapping[str, Read]) -> int:
        """Commit the sampled tokens, and return the number of accepted draft tokens."""
        tokens = {name: each.token_ids for name, each in read.items() if each.choices}
        chosen = {name: ids[-1] for name, ids in tokens.items()}
        self.scheduler.commit(plan, chosen, {name: ids[:-1] for name, ids in tokens.items()})
        checks = [span for span in plan.spans if span.drafts]
        for span in checks:
            assert self.drafts is not None
            name = span.sequence.request_id
            self.drafts.checked(name, len(span.drafts), read[name].accepted)
        return sum(read[span.sequence.request_id].accepted for span in checks)


def generate(runner: Runner, requests: Iterable[Request]) -> dict[str, Finished]:
    """Run to the end and return how each request finished, by its id; of several samples, `id`, `id#1`, ..."""
    ends = (event for event in runner.stream(list(requests)) if isinstance(event, Finished))
    return {intake.sample_name(event.request_id, event.sample): event for event in ends}
