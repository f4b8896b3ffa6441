"""Run requests: text in, events out, one step at a time.

One thread owns a runner. The step itself is in core.py.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from workbench.display import Displayable, Table
from workbench.engine import inputs as intake
from workbench.engine.cache import BuildPages, KVCache
from workbench.engine.config import EngineConfig
from workbench.engine.core import EngineCore
from workbench.engine.describe import runner_headline, runner_table
from workbench.engine.inputs import RunnerOwner
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.schedule import changed_schedule, differences
from workbench.engine.speculator import build_speculator
from workbench.errors import WorkbenchError
from workbench.executors.calibration import calibrate_codecs
from workbench.inspect.attention import Inspection, inspect
from workbench.interrupts import DeferInterrupts
from workbench.progress import to_stderr
from workbench.prompt.assemble import Prompt
from workbench.prompt.conversation import Conversation
from workbench.prompt.templates import ChatTemplate
from workbench.request import FinishReason, Request
from workbench.scheduler.policies import parse_policy
from workbench.trace.events import Event, Finished, SettingsChanged

EXPERT_ROWS_OF_PADDING = 64  # maximum padding rows in a step's bucket


class Runner(Displayable):
    """A loaded model with its KV cache and its requests. The listener receives every event (see `telemetry`)."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        model: LoadedModel | None = None,
        *,
        page_orders: tuple[list[int], ...] | None = None,
        build_pages: BuildPages | None = None,
        listener: Callable[[Event], None] | None = None,
        report: Callable[[str], None] = to_stderr,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Create a runner.

        Args:
            config: all settings; default: `EngineConfig()`.
            model: a model in memory; default: load `config.model` for `config.backend`.
            page_orders: for each cache group, the order in which pages are first used.
            build_pages: creates the pages of the cache if they are shared with other engines.
            listener: receives every event.
            report: receives a line of text for each slow part of loading.
            clock: returns seconds.
            sleep: waits a number of seconds until the next arrival.
        """
        config = (config or EngineConfig()).engine
        if model is not None and config.parallel.tensor > 1 and model.processes is None:
            raise WorkbenchError(
                "parallel.tensor: ranks load their shares by the model's name; give no model in memory"
            )
        loaded = model or LoadedModel.load(config, report)
        self.config, self.is_from_config = config, model is None
        self.loaded_model = loaded
        self.model, self.tokenizer = loaded.transformer, loaded.tokenizer
        spec = self.model.spec
        if self.tokenizer is not None:
            self.tokenizer.check_vocab_size(spec.vocab_size)
        self.clock, self._sleep = clock, sleep
        specs = self.model.cache_shapes(config.cache)
        specs = calibrate_codecs(self.model, specs, config.cache.calibration, self.tokenizer, report)
        self.kv_cache = KVCache.build(self.model, config, lambda: self.core.now, page_orders, build_pages, specs)
        self.store = self.kv_cache.store
        self.core = EngineCore(config, loaded, self.kv_cache, clock, listener)
        self.scheduler, self.tracker, self.telemetry = self.core.scheduler, self.core.tracker, self.core.telemetry
        self.schedule = config.schedule  # the current schedule: see `set_schedule`
        self.owner: RunnerOwner | None = None
        self._request_ids = (f"request-{number}" for number in itertools.count())
        self.core.set_speculator(build_speculator(config, loaded, lambda *draft: Runner(*draft, report=report)))

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests or len(self.tracker.compiling) > 0

    @intake.with_sampling_signature
    def stream(self, requests: intake.RequestInput, **sampling: object) -> Iterator[Event]:
        """Run `requests` (a text, a Conversation, a Request, or several of these) and yield events as they happen.

            for event in runner.stream("def fib(n):", max_tokens=32, temperature=0):
                print(event.text, end="")

        An invalid request gets a Finished event with reason "refused"; a single text or conversation raises its error.
        Closing the iterator cancels the rest, and so does an interrupt (Ctrl-C, a notebook's stop button): the runner
        can then serve the next requests. With n > 1 each sample has its own events, with the request's id and the
        sample number. With best_of > n, events are emitted when all samples have finished; with beams, when the search
        has ended: samples 0 to n - 1 are the best.

        Args:
            requests: one or several texts, conversations or Requests.
            sampling: SamplingParameters for requests given as texts and conversations.
        """
        if self.owner is not None and not self.owner.is_current_thread():
            return self.owner.stream(requests, **sampling)
        return self._stream(self.make_requests(requests, sampling), raises=intake.is_single(requests))

    def make_requests(self, requests: intake.RequestInput, sampling: dict[str, Any]) -> list[Request]:
        """Return `requests` as Request objects, in the given order; texts and conversations are encoded and get an
        id.
        """
        return intake.make_requests(
            requests, self.tokenizer, sampling, self._request_ids, self.assemble, self.sampling_defaults
        )

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return self.loaded_model.sampling_defaults

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.loaded_model.chat_template

    def assemble(self, conversation: Conversation, max_tokens: int = 1) -> Prompt:
        """Return the prompt of a conversation; `overflow` is the policy for prompts over the model's context.

        `cut_oldest` keeps `max_tokens` tokens free for the answer, at most half of the context.
        """
        context, overflow = self.model.spec.max_position_embeddings, self.config.schedule.overflow
        return intake.assemble(self, conversation, context, overflow, max_tokens)

    def cached_tokens(self, prompt_ids: Sequence[int], cache_salt: str = "") -> int:
        """Return how many tokens of a prompt are in the prefix cache now; no reference to them is taken. Callable from
        any thread.
        """
        if self.owner is not None and not self.owner.is_current_thread():
            return self.owner.call(lambda runner: runner.cached_tokens(prompt_ids, cache_salt))
        cache = self.kv_cache.manager.prefix_cache
        return 0 if cache is None else cache.match_prefix(prompt_ids, cache_salt).num_tokens

    def _stream(self, waiting: list[Request], raises: bool) -> Iterator[Event]:
        began = self.clock()
        arriving = deque(sorted(waiting, key=intake.arrival))
        num_unfinished = 0  # number of submitted samples that have not finished
        queue: deque[Event] = deque()
        try:
            while arriving or num_unfinished:
                while arriving and began + intake.arrival(arriving[0]) <= self.clock():
                    num_unfinished += self.submit(request := arriving.popleft(), queue, began + intake.arrival(request))
                if num_unfinished and not queue:
                    self.step(queue)
                elif not queue:
                    self._sleep(max(0.0, min(0.01, began + intake.arrival(arriving[0]) - self.clock())))
                while queue:
                    event = queue.popleft()
                    if isinstance(event, Finished):
                        num_unfinished -= 1
                        if raises and event.reason == FinishReason.REFUSED:
                            raise WorkbenchError(event.error)
                    yield event
        finally:
            self.cancel_all(queue)

    def submit(self, request: Request, queue: deque[Event] | None = None, arrival: float | None = None) -> int:
        """Queue `request`. Its events go to `queue` and to the listener. An invalid request is refused at once.

        Returns:
            the number of Finished events to expect: one per sample.
        """
        self._check_owner()
        begin_ids = self.tokenizer.bos_token_ids if self.tokenizer is not None else ()
        context, overflow = self.model.spec.max_position_embeddings, self.config.schedule.overflow
        request = intake.truncate_prompt(request, context, overflow, begin_ids)
        with self.core.lock.acquire():
            return self.tracker.submit(request, queue if queue is not None else deque(), arrival)

    def cancel(self, request_id: str) -> None:
        """Cancel a request with all its samples; its pages are free on return. Unknown ids are ignored.

        It may be called at any time, also from another thread or a timer. Within a step (by a listener, for example) it
        returns at once, and the step ends the request before it emits more of the request's events.
        """
        self._check_owner()
        self._cancel(request_id)

    def cancel_all(self, queue: deque[Event]) -> None:
        """Cancel every request whose events go to `queue`."""
        self._check_owner()
        self._cancel(*self.tracker.request_ids_of(queue))

    def _cancel(self, *request_ids: str) -> None:
        with DeferInterrupts():
            self.tracker.to_cancel += request_ids
            self.core.lock.process_pending()

    def set_schedule(self, **settings: object) -> None:
        """Change the scheduler's settings from the next step on, also if requests are in progress. No request is lost,
        and each gets the same tokens, if the backend's results do not depend on the batch.

            runner.set_schedule(policy="shortest_prompt", chunk_tokens=16)

        Args:
            settings: of `SchedulerConfig`: kind, policy, max_num_seqs, max_num_batched_tokens, chunked_prefill,
                chunk_tokens. Numbers may not exceed those of the runner's creation.

        Raises:
            WorkbenchError: for an invalid or fixed setting, or one that makes a request in progress impossible. Then no
                setting has changed.
        """
        self._check_owner()
        old, new = self.schedule, changed_schedule(self.config.schedule, self.schedule, settings)
        with self.core.lock.acquire():
            policy = parse_policy(new.policy, new.kind)
            self.scheduler.set_limits(new)
            if (new.policy, new.kind) != (old.policy, old.kind):
                self.scheduler.set_policy(policy)
            self.schedule = new
            for name, before, after in differences(old, new):
                self.telemetry.emit(SettingsChanged(self.clock(), name=name, old=before, new=after))

    def record_experts(self, on: bool = True) -> None:
        """Emit `ExpertsUsed` after each step from now on, with the number of rows that each expert of each layer
        computed.

        It only reads the router's choices; compiled blocks are compiled once more for it. Raises WorkbenchError for a
        model without mixtures of experts.
        """
        self._check_owner()
        if not any(kind.experts for kind in self.model.spec.layers):
            raise WorkbenchError(f"{self.model.spec.name}: no layer is a mixture of experts")
        limits = self.config.schedule
        rows = limits.max_num_batched_tokens + limits.max_num_seqs + EXPERT_ROWS_OF_PADDING
        self.model.record_experts(rows if on else None)

    def close(self) -> None:
        """End the processes of other ranks (`parallel.tensor`), if there are any. They also end with this process, and
        when the runner is garbage-collected.
        """
        self.loaded_model.close()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running sequences keep their pages."""
        self.kv_cache.reset_prefix_cache()

    def inspect(
        self,
        request_id: str,
        positions: Iterable[int] = (-1,),
        *,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        hidden_states: Iterable[int] | None = None,
    ) -> Inspection:
        """Return attention weights and hidden states of a request in progress.

        They are recomputed from the cache's pages, so serving without inspection has no cost.

            runner.inspect(event.request_id, positions=range(8), layers=(0,))  # shown as pictures in a notebook

        Args:
            request_id: the request.
            positions: positions in its text; negative ones count from the last computed token.
            layers: layers of the attention weights; default: all; `()`: none.
            heads: heads of the attention weights; default: all.
            hidden_states: indices of blocks whose input states are returned; the number of layers stands for the last
                block's output.

        Raises:
            WorkbenchError: for an unknown request, position, layer or head.
        """
        sequence = self.tracker.sequences.get(request_id)
        if sequence is None:
            served = ", ".join(self.tracker.sequences) or "none"
            raise WorkbenchError(f"request {request_id!r} is not being served; served now: {served}")
        choices = (None if each is None else tuple(each) for each in (layers, heads, hidden_states))
        return inspect(self.model, self.store, sequence, tuple(positions), *choices)

    def step(self, queue: deque[Event] | None = None) -> None:
        """Run one step: propose, plan, forward, sample, commit, emit.

        Events about the whole step go to `queue`, those of a request to its own queue. An interrupt takes effect either
        during the forward pass, and then no request has advanced, or after the step.
        """
        self._check_owner()
        self.core.step(queue)

    def set_owner(self, owner: RunnerOwner | None) -> None:
        """Make `owner` the only one that may submit requests and run steps; None ends the ownership."""
        self.owner = owner

    def emit(self, event: Event) -> None:
        """Send an event of the caller, such as an agent's round, to the listener soon. Callable from any thread."""
        self._in_owner(lambda: self.telemetry.emit(event))

    def cancel_soon(self, request_id: str) -> None:
        """Cancel a request as `cancel` does; callable from any thread, also if another thread owns the runner."""
        self._in_owner(lambda: self._cancel(request_id))

    def _in_owner(self, function: Callable[[], object]) -> None:
        if self.owner is not None and not self.owner.is_current_thread():
            self.owner.run_soon(function)
        else:
            function()

    def set_listener(self, listener: Callable[[Event], None] | None) -> None:
        """Call `listener` with every event from now on; None removes it."""
        self.telemetry.set_listener(listener)

    def __repr__(self) -> str:
        return f"<Runner {runner_headline(self.model, self.core.backends, self.scheduler)}>"

    def _display_table(self) -> Table:
        return runner_table(self.model, self.tokenizer, self.core.backends, self.store, self.scheduler)

    def _check_owner(self) -> None:
        if self.owner is not None and self.owner.is_other_thread():
            raise WorkbenchError(
                "another thread owns this runner: use runner.stream, or widgets.RunnerThread.attach(runner).call"
            )


def generate(runner: Runner, requests: Iterable[Request]) -> dict[str, Finished]:
    """Run all requests to the end; return their Finished events by request id. If a request has several samples, their
    ids are `id`, `id#1`, ...
    """
    ends = (event for event in runner.stream(list(requests)) if isinstance(event, Finished))
    return {intake.sample_id(event.request_id, event.sample): event for event in ends}
