"""The runner: requests in, events out, one step at a time.

A step reads as a sentence: draft, plan, pack and forward, choose, commit, note. One thread owns a runner.
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
    """A model, its cache and its requests. `note` receives every event (see `instruments`)."""

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
        """`policy` says who is served next: a name or setting of `engine.schedule`, or a function from State to Wishes;
        `set_back` whether the pages of who gives way are computed again or go to the host. `pages` are those of each
        table, or of all alike; `cache` says how keys and values are kept, `cache_dtype` in what type where they are not
        packed (the model's unless given); `page_orders` gives, for each table, the order in which its pages are first
        used; `prefix` and `offload` are values of `cache.settings` or their kinds; `evict` is a policy of
        `cache.evict`, or its settings; `lanes` says which lane decodes where that is not the model's; `compile` is the
        lane inductor's unit; `batch_invariant` as in `load`; `drafts` proposes tokens that a step checks besides."""
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
        self.asked: Mapping[str, Any] = {}  # what `load` was given to make it
        self._names = (f"request-{number}" for number in itertools.count())

    def _fell_back(self, why: str) -> None:
        self.lanes = self.lanes.on_eager(why)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @intake.takes_sampling
    def stream(self, requests: intake.Asked, **sampling: object) -> Iterator[Event]:
        """Run `requests` (a text, a Request, or several of either) and yield what happens as it happens.

            for event in runner.stream("def fib(n):", max_tokens=32, temperature=0):
                print(event.text, end="")

        `sampling` are SamplingParameters for requests given as text. What a bad request gets is a Finished
        event with reason "refused"; a lone text that cannot run raises. Closing the iterator cancels the rest, and so
        does an interrupt (Ctrl-C, a notebook's stop button), whenever it comes: the runner goes on with the next.
        With n > 1 each sample has events of its own: the request's id, and the sample's number. Those of best_of > n
        come when all have ended, those of beams when the search has: samples 0 to n - 1 are the best.
        """
        if self.owner is not None and not self.owner.here():
            return self.owner.stream(requests, **sampling)
        return self._stream(self.read(requests, sampling), raises=isinstance(requests, str))

    def read(self, requests: intake.Asked, sampling: dict[str, Any]) -> list[Request]:
        """`requests` as Requests, in the order asked; texts are encoded and named."""
        return intake.requests_from(requests, self.tokenizer, sampling, self._names)

    def _stream(self, asked: list[Request], raises: bool) -> Iterator[Event]:
        began = self.clock()
        coming = deque(sorted(asked, key=intake.due))
        owed = 0  # requests submitted whose end is still to come
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
        """Queue `request`; its events go to `box` and to the instruments. One that cannot run ends at once, refused.

        Returns how many Finished events are to come, or came: one a sample.
        """
        self._check_owner()
        begin_ids = self.tokenizer.begin_ids if self.tokenizer is not None else ()
        request = intake.fit(request, self.model.spec.context, self.overflow, begin_ids)
        with self.books.open():
            return self.served.submit(request, box if box is not None else deque(), arrival)

    def cancel(self, request_id: str) -> None:
        """End a request now, with all its samples, whatever it is doing; its pages are free when this returns.
        Unknown ids are ignored.

        It may be called at any moment, by another thread or a timer too. In the midst of a step (by a listener, say) it
        returns at once, and the step ends the request before it tells any more of it."""
        self._check_owner()
        self._cancel(request_id)

    def cancel_all(self, box: deque[Event]) -> None:
        """As `cancel`, of every request whose events go to `box`."""
        self._check_owner()
        self._cancel(*self.served.of(box))

    def _cancel(self, *request_ids: str) -> None:
        with HeldBack():
            self.served.noted += request_ids
            self.books.settle()

    def speculate(self, drafts: Drafts | None) -> None:
        """From the next step on tokens that `drafts` proposes are checked besides; with None, none."""
        if drafts is not None and self.cache.evictor is not None:
            raise WorkbenchError(excluded(False, True, True))
        if self.drafts is not None:
            self.drafts.clear()
        self.drafts = drafts
        self.served.chooser.accept = drafts.accept if drafts is not None else "rejection"

    def forget_prefixes(self) -> None:
        """Give up every page that is kept for later requests; what runs keeps its own."""
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
        """Attention weights and hidden states of a request that is being served, for the positions `rows` of its text
        (negative ones from the last computed): recomputed from the cache's pages, and costing nothing until then.

            runner.inspect(event.request_id, rows=range(8), layers=(0,))  # its value is shown as pictures

        `layers` and `heads` choose the weights (all unless given, none for `()`), `hidden` the blocks before which
        hidden states are wanted, the number of layers for what leaves the last. WorkbenchError for what is missing."""
        sequence = self.served.sequences.get(request_id)
        if sequence is None:
            known = ", ".join(self.served.sequences) or "none"
            raise WorkbenchError(f"request {request_id!r} is not being served; served now: {known}")
        asked = (None if each is None else tuple(each) for each in (layers, heads, hidden))
        return inspect(self.model, self.store, sequence, tuple(rows), *asked)

    def step(self, box: deque[Event] | None = None) -> None:
        """Compute one step. Events about the whole step go to `box`, those of a request to its own. An interrupt comes
        while the model computes, and then nobody has got on, or when the step is over."""
        self._check_owner()
        with self.books.open() as held:
            self._step(box, held)

    def _step(self, box: deque[Event] | None, held: HeldBack) -> None:
        began = self.now = self.clock()  # within a step time stands still: life times are the same when it is replayed
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
        except Exception as error:  # the requests of this step end with it; those that waited go on
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
        """Tokens to be checked in the next step."""
        if self.drafts is None:
            return {}
        try:
            return self.drafts.propose(self.scheduler.running)
        except Exception as error:  # those that run cannot go on as was asked; those that wait can
            self.served.broke(list(self.scheduler.running), error)
            return {}

    def _commit(self, plan: StepPlan, read: Mapping[str, Read]) -> int:
        """Sequences are as long as the step has made them; how many drafted tokens stood."""
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
    """Run to the end and keep only how each request finished, by its id; of several samples, `id`, `id#1`, ..."""
    ends = (event for event in runner.stream(list(requests)) if isinstance(event, Finished))
    return {intake.sample_name(event.request_id, event.sample): event for event in ends}
