"""Simulate one instance: the project's own scheduler and cache, driven by an integer clock instead of a model.

`InstanceSpec` describes it: cache, scheduler limits, step times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from workbench.errors import WorkbenchError
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import NULL_PAGE, KVCacheGroup, PagePool, pages_for
from workbench.kv_cache.prefix import RadixCache
from workbench.request import FinishReason, Request, SamplingParameters, Sequence, SwappedPages
from workbench.scheduler.fast_forward import fast_forward, steps_until_change
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.plan import RequestRefused, StepPlan
from workbench.scheduler.policy import SchedulingPolicy
from workbench.scheduler.scheduler import Scheduler
from workbench.simulate.job import SimulatedRequest
from workbench.simulate.roofline import Hardware, ModelSizes, roofline_step_times
from workbench.simulate.step_times import TICKS_PER_SECOND, StepSeries, StepTimeModel, step_work_of
from workbench.units import format_bytes

RECEIVE_POOL_FACTOR = 16  # size of the pool for received sequences / pages of the cache
NO_TOKEN = -(2**40)  # placeholder token: no model samples tokens


@dataclass(frozen=True)
class InstanceSpec:
    """A simulated instance's cache, limits and step times.

    `pages` and `page_bytes` are by page table. `receives_kv`: sequences arrive from other instances with their pages.
    `swap_ticks_per_byte` is the cost of moving pages to and from CPU memory."""

    times: StepTimeModel
    tables: tuple[KVCacheGroup, ...]
    pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    page_size: int
    context: int
    limits: SchedulerLimits = SchedulerLimits()
    policy: SchedulingPolicy | None = None  # None: the engine's default
    prefix: bool = False
    ttl: float | None = None  # seconds that a cached prefix lives after its last use
    receives_kv: bool = False
    swap_ticks_per_byte: float = 0.0

    def make_scheduler(self, clock: Callable[[], float]) -> Scheduler:
        """Build a new scheduler with an empty cache."""
        pools = tuple(PagePool(pages, self.page_size) for pages in self.pages)
        cpu_pools = (
            tuple(PagePool(RECEIVE_POOL_FACTOR * pages, self.page_size) for pages in self.pages)
            if self.receives_kv
            else ()
        )
        index = RadixCache(pools, self.tables, self.ttl, clock, cpu_pools) if self.prefix else None
        manager = KVCacheManager(pools, self.tables, self.limits.max_chunk_tokens, index, cpu_pools)
        return Scheduler(manager, self.limits, self.context, self.policy)

    @property
    def kv_bytes_per_token(self) -> float:
        return sum(self.page_bytes) / self.page_size


def instance_spec(
    sizes: ModelSizes,
    hardware: Hardware,
    limits: SchedulerLimits,
    *,
    gpus: int = 1,
    page_size: int = 64,
    memory_share: float = 0.9,
    cache_bytes: float | None = None,
    pages: int | None = None,
    context: int | None = None,
    prefix: bool = False,
    ttl: float | None = None,
    receives_kv: bool = False,
    times: StepTimeModel | None = None,
    policy: SchedulingPolicy | None = None,
) -> InstanceSpec:
    """Build the instance of `gpus` accelerators that serve a model.

    Page tables share the cache in the proportion in which full contexts need them.

    Args:
        sizes: Bytes of the model's weights and cache.
        hardware: One accelerator.
        limits: Limits of the scheduler.
        gpus: Number of accelerators.
        page_size: Tokens of a page.
        memory_share: Fraction of the memory for weights and cache.
        cache_bytes: Bytes of the cache; None is what the weights leave.
        pages: Pages of each table, instead of `cache_bytes`.
        context: Maximum tokens of a sequence; None is the model's context.
        prefix: Keep a prefix cache.
        ttl: Seconds that a cached prefix lives after its last use; None is forever.
        receives_kv: Sequences arrive from other instances with their pages.
        times: Step times; None is the roofline.
        policy: Scheduling policy; None is the engine's default.

    Raises:
        WorkbenchError: If the weights leave no memory for a cache.
    """
    spec, context = sizes.spec, context or sizes.spec.max_position_embeddings
    room = memory_share * gpus * hardware.memory - sizes.weight_bytes if cache_bytes is None else cache_bytes
    page_bytes = tuple(round(each * page_size) for each in sizes.token_bytes)
    wanted = [table.max_pages(context, limits.max_chunk_tokens, page_size) for table in sizes.tables]
    whole = sum(pages * each for pages, each in zip(wanted, page_bytes, strict=True))
    counts = tuple(int(each * room // whole) if pages is None else pages for each in wanted)
    if min(counts) < 1:
        raise WorkbenchError(
            f"{spec.name} leaves no memory for its cache: {format_bytes(sizes.weight_bytes)} of weights on {gpus} x "
            f"{hardware.name} with {format_bytes(hardware.memory)} each; set more gpus, or use a smaller model"
        )
    return InstanceSpec(
        times or roofline_step_times(sizes, hardware, gpus), sizes.tables, counts, page_bytes, page_size, context,
        limits, policy, prefix, ttl, receives_kv, TICKS_PER_SECOND / (hardware.cpu_link * gpus),
    )  # fmt: skip


@dataclass
class PlannedSteps:
    """A series of equal steps that is planned at once; `plan` is the plan of its first step."""

    plan: StepPlan
    series: StepSeries
    start: int
    steps: int

    @property
    def end(self) -> int:
        return self.start + self.series.elapsed(self.steps)


@dataclass
class InstanceCounters:
    """Sums over the steps of one instance."""

    steps: int = 0
    plans: int = 0
    busy_ticks: int = 0  # ticks
    sequence_steps: int = 0  # sequences, summed over steps
    max_sequences: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    stored_tokens: int = 0  # tokens in the cache, summed over steps
    reserved_tokens: int = 0  # tokens that the pages of those sequences could hold


class Instance:
    """A simulated instance. `start` plans a series of steps, which ends by itself or is cut short by a new request;
    `finish` commits the series.

    Args:
        spec: The instance's cache, limits and step times.
        number: Its index in the fleet.
        single_step: Advance every step alone, as a check.
        on_steps: Called with each finished series before its requests leave.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        number: int,
        *,
        single_step: bool = False,
        on_steps: Callable[[Instance, PlannedSteps], None] | None = None,
    ):
        self.spec, self.number, self.single_step, self.on_steps = spec, number, single_step, on_steps
        self.now = 0
        self.up, self.incarnation = True, 0
        self.removed = False  # failed for good
        self.current: PlannedSteps | None = None
        self.counters = InstanceCounters()
        self.jobs: dict[str, SimulatedRequest] = {}
        self.scheduler: Scheduler = spec.make_scheduler(self._clock)
        self._orders = 0
        self._came_over: set[str] = set()

    @property
    def num_requests(self) -> int:
        return len(self.jobs)

    @property
    def pending_prompt_tokens(self) -> int:
        """Return the number of prompt tokens still to be computed here."""
        waiting = sum(s.num_new_tokens - 1 for s in self.scheduler.waiting if s.swapped is None)
        return waiting + sum(s.num_new_tokens - 1 for s in self.scheduler.running)

    def cached_tokens(self, prompt: tuple[int, ...], tenant: str) -> int:
        """Return the number of tokens of `prompt` that are in the prefix cache."""
        index = self.scheduler.kv_cache_manager.prefix_cache
        return index.match_prefix(prompt, tenant).num_tokens if index is not None else 0

    def submit(self, job: SimulatedRequest, now: int, handed_over: bool = False) -> str:
        """Submit a request, with its keys and values if it was `handed_over`.

        Returns the reason of a refusal, or "" if it was accepted."""
        self.now = now
        sampling = _sampling(job.tokens_on_instance)
        asked = job.arrival
        request = Request(
            job.name, job.prompt, sampling, cache_salt=asked.tenant, priority=asked.priority, tenant=asked.tenant,
            deadline=asked.deadline, predicted_tokens=asked.predicted_tokens,
        )  # fmt: skip
        sequence = Sequence(request, self._orders, [*job.prompt, *(NO_TOKEN - job.number,) * job.generated_tokens])
        sequence.arrival_time = job.arrival_time / TICKS_PER_SECOND
        self._orders += 1
        if handed_over:
            sequence.swapped = self._receive_pages(len(sequence.token_ids) - 1)
            self._came_over.add(job.name)
        try:
            self.scheduler.submit(sequence)
        except RequestRefused as refusal:
            if sequence.swapped is not None:
                self.scheduler.kv_cache_manager.cpu_pages.release(sequence.swapped)
            return str(refusal)
        self.jobs[job.name] = job
        job.instances.append(self.number)
        if self.current is not None:  # the request joins at the end of the running step
            self.current.steps = max(1, self.current.series.steps_until(now - self.current.start, self.current.steps))
        return ""

    def start(self, now: int) -> list[SimulatedRequest]:
        """Plan and begin the next series of steps, if there is anything to do.

        Returns the requests that end now with an error, because the policy's decision for them was invalid."""
        self.now = now
        broken: list[SimulatedRequest] = []
        decisions, moving = (), 0
        while (plan := self.scheduler.plan(now=now / TICKS_PER_SECOND)) is not None:
            decisions, moving = (*decisions, *plan.decisions), moving + self._swap_ticks(plan)
            for decision in plan.decisions:
                if decision.action == "admitted" and (job := self.jobs[decision.request_id]).first_scheduled is None:
                    job.first_scheduled = now
            for sequence, fault in plan.errors:
                self.scheduler.finish(sequence, FinishReason.ERROR)
                broken.append(self._leave(sequence))
                broken[-1].error = fault
            if broken:
                plan = replace(plan.unfinished(), decisions=decisions)
            if plan.spans:
                self.current = self._begin(plan, moving)
                break
        return broken

    def _begin(self, plan: StepPlan, swap_ticks: int) -> PlannedSteps:
        """Build the series that begins with `plan`; swapping pages takes `swap_ticks` ticks."""
        times = self.spec.times
        spans = [(s.start, s.length) for s in plan.spans] + [(0, 1)] * plan.padding_rows
        work = step_work_of(spans, sum(s.needs_sample for s in plan.spans) + plan.padding_rows, times.kinds)
        steps, rows = (1, ()) if self.single_step else self._steps_until_change(plan)
        return PlannedSteps(plan, times.series(work, rows, swap_ticks), self.now, steps)

    def finish(self) -> list[SimulatedRequest]:
        """Commit the current series and return the requests that leave with it."""
        move, self.current = self.current, None
        assert move is not None
        self.now = move.end
        self._count(move)
        plan = fast_forward(self.scheduler, move.plan, move.steps, NO_TOKEN)
        first, longest = move.series.elapsed(1), move.series.last_step(move.steps)
        chosen, done = {}, []
        for span in plan.spans:
            if span.needs_sample:
                job = self.jobs[span.sequence.request_id]
                chosen[job.name] = NO_TOKEN - job.number
                job.add_tokens(move.steps, move.start + first, longest, self.now)
                if job.generated_tokens >= job.tokens_on_instance:
                    done.append(span.sequence)
        self.scheduler.commit(plan, chosen)
        if self.on_steps is not None:
            self.on_steps(self, move)
        for sequence in done:
            self.scheduler.finish(sequence, FinishReason.LENGTH)
        return [self._leave(sequence) for sequence in done]

    def fail(self, now: int) -> list[SimulatedRequest]:
        """Fail the instance and return its requests, with the tokens of the steps completed by then."""
        if self.current is not None:
            self.current.steps = self.current.series.steps_until(now - self.current.start + 1, self.current.steps) - 1
            if self.current.steps:
                self.finish()
        self.current, self.now, self.up = None, now, False
        here = [sequence for queue in (self.scheduler.running, self.scheduler.waiting) for sequence in queue]
        return sorted((self._leave(sequence) for sequence in here), key=lambda job: job.number)

    def recover(self, now: int) -> None:
        """Restart the instance with an empty cache."""
        self.now, self.up, self.incarnation = now, True, self.incarnation + 1
        self.scheduler, self._came_over = self.spec.make_scheduler(self._clock), set()

    def _clock(self) -> float:
        return self.now / TICKS_PER_SECOND

    def _steps_until_change(self, plan: StepPlan) -> tuple[int, tuple[int, ...]]:
        """Return the number of steps planned like this one, and by attention reach the number of queries whose context
        still grows."""
        steps, rows = steps_until_change(self.scheduler, plan), []
        if steps == 1:
            return 1, ()
        for span in plan.spans:
            job = self.jobs[span.sequence.request_id]
            steps = min(steps, job.tokens_on_instance - job.generated_tokens)
        for kind in self.spec.times.kinds:
            left = (
                [kind.max_positions - s.end for s in plan.spans if s.end < kind.max_positions]
                if kind.max_positions is not None
                else None
            )
            rows.append(len(plan.spans) if left is None else len(left))
            steps = min([steps, *(left or ())])
        return steps, tuple(rows)

    def _swap_ticks(self, plan: StepPlan) -> int:
        """Return the ticks of swapping pages to and from CPU memory; pages received from another instance cost none."""
        if not plan.transfers:
            return 0
        moved = sum(self.spec.page_bytes[t] for t, _, _ in plan.transfers.swap_outs)
        moved += sum(self.spec.page_bytes[t] for n, t, _, _ in plan.transfers.swap_ins if n not in self._came_over)
        self._came_over.difference_update(name for name, _, _, _ in plan.transfers.swap_ins)
        return round(moved * self.spec.swap_ticks_per_byte)

    def _receive_pages(self, computed: int) -> SwappedPages | None:
        """Allocate pages for a received sequence; None if there are too few, so that it is computed again."""
        cpu_pools, size = self.scheduler.kv_cache_manager.cpu_pages.pools, self.spec.page_size
        wanted = []
        for table in self.spec.tables:
            out_of_window = table.out_of_window_pages(computed, size)
            wanted.append(
                [place not in out_of_window for place in range(pages_for(table.quantized_until(computed), size))]
            )
        if any(sum(live) > pool.num_free for live, pool in zip(wanted, cpu_pools, strict=True)):
            return None
        places = []
        for live, pool in zip(wanted, cpu_pools, strict=True):
            mine = pool.allocate(sum(live))
            places.append([mine.pop() if lives else NULL_PAGE for lives in live])
        return SwappedPages(computed, tuple(places))

    def _leave(self, sequence: Sequence) -> SimulatedRequest:
        job = self.jobs.pop(sequence.request_id)
        job.cached_tokens += sequence.cached_tokens
        job.computed_tokens += sequence.computed_tokens
        job.written_tokens += sequence.written_tokens
        job.num_preemptions += sequence.num_preemptions
        return job

    def _count(self, move: PlannedSteps) -> None:
        tally, plan, steps = self.counters, move.plan, move.steps
        rows, pool = len(plan.spans), self.scheduler.pools[0]
        tally.steps += steps
        tally.plans += 1
        tally.busy_ticks += move.series.elapsed(steps)
        tally.sequence_steps += rows * steps
        tally.max_sequences = max(tally.max_sequences, rows)
        decodes = plan.decode_tokens
        tally.decode_tokens += decodes * steps
        tally.prefill_tokens += plan.num_tokens - decodes
        stored = sum(sequence.num_computed_tokens for sequence in self.scheduler.running) + plan.num_tokens
        tally.stored_tokens += stored * steps + rows * (steps * (steps - 1) // 2)
        tally.reserved_tokens += pool.num_used * pool.page_size * steps


@lru_cache(maxsize=4096)
def _sampling(tokens: int) -> SamplingParameters:
    return SamplingParameters(max_tokens=tokens, ignore_eos=True)
