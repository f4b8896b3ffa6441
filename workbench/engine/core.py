"""Run one engine step at a time: propose drafts, plan, forward (pack and compute), sample, commit, emit events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain

import torch

from workbench.decoding.decoder import Decoder
from workbench.decoding.early_logits import EarlyLogits
from workbench.engine.cache import KVCache
from workbench.engine.config import EngineConfig, exclusion
from workbench.engine.faults import StepLock, forward_isolated, select_logits
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.outputs import DetokenizedTokens
from workbench.engine.requests import RequestTracker
from workbench.engine.telemetry import StepTimestamps, Telemetry
from workbench.errors import WorkbenchError
from workbench.executors.build import build_step_runner
from workbench.executors.contention import StepThreads
from workbench.executors.select import Backends, why_no_early_layers
from workbench.executors.step_runner import StepRunner
from workbench.executors.thread_waiting import THREADS
from workbench.interrupts import DeferInterrupts
from workbench.sampling.sampler import Sampler
from workbench.sampling.verify import Draft
from workbench.scheduler.plan import StepPlan
from workbench.scheduler.policies import parse_policy
from workbench.scheduler.scheduler import Scheduler
from workbench.speculative.proposers import Speculator
from workbench.tensor_parallel.executor import TensorParallelStore, build_rank_runner
from workbench.tensor_parallel.transformer import TensorParallelTransformer
from workbench.trace.events import Event, ExpertsUsed, ThreadsChanged

MAX_IDLE_SECONDS = 0.05  # plan of a step in which every request waits for its grammar


class EngineCore:
    """The engine step, with the parts that it uses: scheduler, cache, step runner, requests, speculator."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        kv_cache: KVCache,
        clock: Callable[[], float],
        listener: Callable[[Event], None] | None,
    ):
        self.model, self.kv_cache, self.clock = loaded.transformer, kv_cache, clock
        self.now = 0.0  # time of the current step, in seconds
        spec, store, schedule = self.model.spec, kv_cache.store, config.schedule
        self.backends = loaded.backends or Backends.own(self.model, store)
        policy = parse_policy(schedule.policy, schedule.kind)
        self.scheduler = Scheduler(kv_cache.manager, schedule, spec.max_position_embeddings, policy)
        self._thread_changes: list[tuple[int, str]] = []  # in the current step
        self.executor = self._build_executor(config, loaded)
        self.telemetry = Telemetry(self.model, store, self.scheduler.pools, clock, listener)
        problem = why_no_early_layers(self.backends, config.batch_invariant, config.parallel.tensor)
        early_logits = EarlyLogits(len(spec.layers), self._logits_of_states, problem)
        self.decoder = Decoder(Sampler(spec.vocab_size), early_logits, spec.vocab_size)
        emit = self.telemetry.emit
        self.tracker = RequestTracker(spec, loaded.tokenizer, self.scheduler, kv_cache, self.decoder, emit, clock)
        self.lock = StepLock(
            lambda: bool(self.tracker.to_cancel),
            self.tracker.process_cancellations,
            self.telemetry.raise_listener_error,
        )
        self.speculator: Speculator | None = None
        self._compiles = 0  # before the current step

    def _build_executor(self, config: EngineConfig, loaded: LoadedModel) -> StepRunner:
        store = self.kv_cache.store
        if isinstance(store, TensorParallelStore) and loaded.processes is not None:
            assert isinstance(self.model, TensorParallelTransformer)
            return build_rank_runner(self.model, store, loaded.processes.threads, self.backends, config.batch_invariant)
        threads = StepThreads(lambda *change: self._thread_changes.append(change))
        how = config.compile, config.batch_invariant, self.fall_back, threads, self.kv_cache.evictor, config.program
        return build_step_runner(self.model, store, self.backends, *how)

    @torch.inference_mode()
    def _logits_of_states(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [sample, vocab] for hidden states [sample, hidden] after some layer."""
        return self.model.compute_logits(states.to(self.model.dtype))

    def fall_back(self, why: str) -> None:
        """Record that steps run on the eager backend from now on."""
        self.backends = self.backends.fall_back_to_eager(why)

    def set_speculator(self, speculator: Speculator | None) -> None:
        """Use `speculator` from the next step on; None switches speculation off."""
        if speculator is not None and self.kv_cache.evictor is not None:
            raise WorkbenchError(exclusion("speculate", "cache.evict"))
        if self.speculator is not None:
            self.speculator.clear()
        self.speculator = speculator
        self.decoder.sampler.acceptance_rule = "rejection" if speculator is None else speculator.accept

    def step(self, queue: deque[Event] | None) -> None:
        """Run one step. Events about the whole step go to `queue`, those of a request to its own queue."""
        if not self.scheduler.has_unfinished_requests:
            self.tracker.compiling.wait(MAX_IDLE_SECONDS)
        with self.lock.acquire() as interrupts:
            self.tracker.submit_compiled()
            with THREADS.step(
                self.model.device, lambda why: self._thread_changes.append((torch.get_num_threads(), why))
            ):
                self._step(queue, interrupts)

    def wait_for_grammars(self) -> None:
        """Wait until the grammars of all requests are compiled."""
        while len(self.tracker.compiling):
            self.tracker.compiling.wait(MAX_IDLE_SECONDS)
            with self.lock.acquire():
                self.tracker.submit_compiled()

    def _step(self, queue: deque[Event] | None, interrupts: DeferInterrupts) -> None:
        began = self.now = self.clock()  # one time per step, so that TTLs are the same in a replay
        proposed = self._propose()
        drafted = self.clock()
        plan, planned, pages = self._plan(proposed, began)
        if not plan.spans:
            return
        computed_plan, logits = self._forward(plan, interrupts)
        computed = self.clock()
        accepted = self._sample_and_commit(computed_plan, logits, proposed)
        self._emit_step(plan, pages, StepTimestamps(began, drafted - began, planned, computed), accepted, queue)

    def _propose(self) -> dict[str, Draft]:
        """Return draft tokens to verify in the next step."""
        if self.speculator is None:
            return {}
        try:
            return self.decoder.sampler.legal_drafts(self.speculator.propose(self.scheduler.running))
        except Exception as error:  # running requests need the failed proposer; waiting ones do not
            self.tracker.fail(list(self.scheduler.running), error)
            return {}

    def _plan(self, proposed: dict[str, Draft], began: float) -> tuple[StepPlan, float, list[tuple[int, int]]]:
        """Plan the step and execute its page transfers; fail the requests that cannot take part.

        Returns:
            The plan (without spans if there is nothing to compute), the time of planning, and pages in use by group.
        """
        plan = self.scheduler.plan({name: draft.token_ids for name, draft in proposed.items()}, began)
        if plan is None:
            return StepPlan(self.scheduler.next_step, ()), began, []
        if trees := {name: draft.parents for name, draft in proposed.items() if draft.parents is not None}:
            plan = plan.with_trees(trees)
        self.telemetry.emit_step_planned(plan, began)
        plan, failures = self.kv_cache.transfer_pages(plan, chain(self.scheduler.running, self.scheduler.waiting))
        planned, pages = self.clock(), self.telemetry.pages_in_use()
        plan = self.tracker.before_forward(plan, failures, planned)
        if self.executor.gathers_logits:
            observed = self.speculator is not None and (self.speculator.observed_top_k or 0) > 1
            plan = replace(plan, only_largest=not observed and self.decoder.needs_only_largest(plan))
        return plan, planned, pages

    def _forward(self, plan: StepPlan, interrupts: DeferInterrupts) -> tuple[StepPlan, torch.Tensor]:
        """Compute the logits of `plan`, [sample, vocab]; return the part of the plan that is not cancelled, with its
        logits.
        """
        try:
            with interrupts.allow():
                logits = self.executor.forward(plan)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("within a step, which is as if it had not begun") from None  # no traceback
        except Exception:
            with interrupts.allow():
                plan, logits, failed = forward_isolated(self.executor.forward, plan)
            for sequence, error in failed:
                self.tracker.fail([sequence], error)
        self.tracker.process_cancellations()
        left = plan.unfinished()
        if len(left.spans) < len(plan.spans):  # cancelled while the model computed
            plan, logits = left, select_logits(plan, left, logits)
        return plan, logits

    def _sample_and_commit(self, plan: StepPlan, logits: torch.Tensor, proposed: dict[str, Draft]) -> int:
        """Sample, commit and emit the tokens of the step; return the number of accepted draft tokens."""
        accepted = 0

        def commit(advanced: StepPlan, detokenized: Mapping[str, DetokenizedTokens]) -> None:
            nonlocal accepted
            accepted = self._commit(advanced, detokenized)
            self._observe(plan, logits, proposed, detokenized)

        self.tracker.after_forward(plan, logits, proposed, commit)
        return accepted

    def _commit(self, plan: StepPlan, detokenized: Mapping[str, DetokenizedTokens]) -> int:
        """Commit the sampled tokens, and return the number of accepted draft tokens."""
        tokens = {name: each.token_ids for name, each in detokenized.items() if each.tokens}
        sampled = {name: ids[-1] for name, ids in tokens.items()}
        for span in plan.spans:
            if span.draft_parents and (ids := tokens.get(span.sequence.request_id)):
                draft = Draft(span.draft_token_ids, None, span.draft_parents)
                self.kv_cache.keep_path(span.sequence, span.num_known_tokens, draft.follow(ids[:-1]))
        self.scheduler.commit(plan, sampled, {name: ids[:-1] for name, ids in tokens.items()})
        checks = [span for span in plan.spans if span.draft_token_ids]
        for span in checks:
            assert self.speculator is not None
            name = span.sequence.request_id
            self.speculator.record_acceptance(name, len(span.draft_token_ids), detokenized[name].num_accepted)
        return sum(detokenized[span.sequence.request_id].num_accepted for span in checks)

    def _observe(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        proposed: dict[str, Draft],
        detokenized: Mapping[str, DetokenizedTokens],
    ) -> None:
        """Show the step's verification results to the proposer; fail the requests for which it raises."""
        if self.speculator is None or self.speculator.observed_top_k is None:
            return
        try:
            tokens = {name: each.token_ids for name, each in detokenized.items()}
            self.speculator.observe(plan, logits, proposed, tokens)
        except Exception as error:
            self.tracker.fail([span.sequence for span in plan.spans], error)

    def _emit_step(
        self,
        plan: StepPlan,
        pages: list[tuple[int, int]],
        times: StepTimestamps,
        accepted: int,
        queue: deque[Event] | None,
    ) -> None:
        """Emit the events of the whole step."""
        compiles, kernels = self.executor.compiles, self.executor.kernel_seconds
        if compiles != self._compiles:
            self.scheduler.ignore_step_time()
            self._compiles = compiles
        for threads, reason in self._thread_changes:
            self.telemetry.emit(ThreadsChanged(self.clock(), step=plan.step, threads=threads, reason=reason))
        self._thread_changes.clear()
        events: list[Event] = [self.telemetry.emit_step(plan, pages, times, accepted, compiles, kernels)]
        if (use := self.model.expert_use) is not None:
            events.append(ExpertsUsed(events[0].time, step=plan.step, layers=use.take()))
            self.telemetry.emit(events[1])
        if queue is not None:
            queue += events
