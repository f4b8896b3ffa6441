"""Run small schedules of integers to test a policy: arrivals, pages and the policy's decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.kv_cache.prefix import RadixCache
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.plan import RequestRefused, StepPlan
from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState, SchedulingPolicy, Turn
from workbench.scheduler.scheduler import Scheduler
from workbench.scheduler.validate import items_of, policy_name
from workbench.testing.law import LawBroken

PAGE_SIZE, CONTEXT = 4, 48
STALL_STEPS = 100  # steps without progress; enough to recompute preempted requests
KV_CACHE_GROUPS = {
    "full": (KVCacheGroup(),),
    "full and window": (KVCacheGroup(), KVCacheGroup(sliding_window=5)),
    "sinks and window": (KVCacheGroup(sliding_window=6, num_sink_tokens=3),),
    "packed": (KVCacheGroup(residual_length=5, quant_group=2), KVCacheGroup(sliding_window=7)),
}


@dataclass(frozen=True)
class ArrivingRequest:
    """One request that arrives: its sizes, and the number of steps since the previous arrival."""

    steps_after: int
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    tenant: int = 0
    samples: int = 1
    deadline: float | None = None  # seconds after its arrival
    predicted_tokens: int | None = None
    shares_prefix: bool = True

    def request(self, name: str) -> Request:
        # Prompts share a prefix, so that the prefix index has hits.
        shared = 9 if self.shares_prefix else 0
        ids = tuple(0 if i < shared else 1 + hash((name, i)) % 7 for i in range(self.prompt_tokens))
        sampling = SamplingParameters(max_tokens=self.max_tokens)
        return Request(
            name, ids, sampling, priority=self.priority, tenant=f"tenant {self.tenant}", deadline=self.deadline,
            predicted_tokens=self.predicted_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class PolicyScenario:
    arrivals: tuple[ArrivingRequest, ...]
    kv_cache_groups: str = "full"
    pages: int = 12
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 7
    chunked_prefill: bool = True
    prefix: bool = False

    def __repr__(self) -> str:
        asks = ", ".join(f"{c.prompt_tokens}+{c.max_tokens}" for c in self.arrivals)
        cut = "" if self.chunked_prefill else ", prefills whole"
        known = ", with a prefix index" if self.prefix else ""
        asks = f"requests of {asks} tokens, " if asks else ""
        return (
            f"{asks}{self.pages} pages of {PAGE_SIZE} ({self.kv_cache_groups}), "
            f"max_num_seqs {self.max_num_seqs}, max_num_batched_tokens {self.max_num_batched_tokens}{cut}{known}"
        )

    def scheduler(self, policy: SchedulingPolicy) -> Scheduler:
        tables = KV_CACHE_GROUPS[self.kv_cache_groups]
        pools = tuple(PagePool(self.pages, PAGE_SIZE) for _ in tables)
        index = RadixCache(pools, tables) if self.prefix else None
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunked_prefill=self.chunked_prefill,
        )
        return Scheduler(KVCacheManager(pools, tables, self.max_num_batched_tokens, index), limits, CONTEXT, policy)


def policy_scenarios() -> st.SearchStrategy[PolicyScenario]:
    coming = st.builds(
        ArrivingRequest, st.integers(0, 3), st.integers(1, 20), st.integers(1, 6), st.integers(0, 2), st.integers(0, 2),
        st.sampled_from([1, 1, 1, 2, 3]), st.sampled_from([None, 0.5, 5.0]), st.sampled_from([None, 1, 9]),
    )  # fmt: skip
    return st.builds(
        PolicyScenario, st.lists(coming, min_size=1, max_size=5).map(tuple), st.sampled_from(list(KV_CACHE_GROUPS)),
        st.integers(8, 16), st.integers(1, 4), st.integers(2, 9), st.booleans(), st.booleans(),
    )  # fmt: skip


def with_lists(decision: SchedulerDecision, state: SchedulerState) -> SchedulerDecision:
    """Return a scheduler's decision whose order and kept requests are lists, with groups expanded to their requests."""
    num_requests = len(state.running) + len(state.waiting)
    order = list(items_of(decision.order, "it", num_requests))
    keep = None if decision.keep is None else list(items_of(decision.keep, "it", num_requests))
    return SchedulerDecision(order, keep, tuple(decision.preempted), dict(decision.reasons))


def requests_of(order: Iterable[object]) -> list[RequestView]:
    """Return the requests in a decision's order, which must have no groups."""
    requests = [item.request if isinstance(item, Turn) else item for item in order]
    return [request for request in requests if isinstance(request, RequestView)]


STEP_SECONDS = 0.25  # so that policies with deadlines meet some and miss others


@dataclass
class ScheduleHarness:
    """A scheduler that runs requests without a model.

    `last_decision` is the policy's last input state and its decision.
    """

    scheduler: Scheduler
    policy: SchedulingPolicy
    unfinished: list[Sequence] = field(default_factory=list)
    num_submitted: int = 0
    now: float = 0.0  # seconds: STEP_SECONDS per step
    last_decision: tuple[SchedulerState, SchedulerDecision] | None = None

    @classmethod
    def from_scenario(cls, scenario: PolicyScenario, policy: SchedulingPolicy) -> ScheduleHarness:
        played = cls(scenario.scheduler(policy), policy)
        played.scheduler.set_policy(played)  # called before every step, since it is not declared steady
        return played

    @property
    def kind(self) -> str:
        return policy_name(self.policy)

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        state = state.materialize()
        decision = self.policy(state)
        if isinstance(decision, SchedulerDecision):
            decision = with_lists(decision, state)
            self.last_decision = state, decision
        return decision

    def submit(self, coming: ArrivingRequest, name: str) -> Sequence | None:
        """Queue a request and return its sequence; None if the request could never run."""
        new = [
            Sequence.from_request(coming.request(f"{name}.{i}" if i else name), self.num_submitted + i)
            for i in range(coming.samples)
        ]
        for sequence in new:
            sequence.arrival_time = self.now
        try:
            self.scheduler.submit(new[0], new[1:])
        except RequestRefused:
            return None
        self.num_submitted += len(new)
        self.unfinished += new
        return new[0]

    def step(self) -> StepPlan | None:
        """Run one step, and finish the requests that have reached their length. Raise LawBroken if the policy gives no
        plan.
        """
        self.last_decision = None
        try:
            plan = self.scheduler.plan(now=self.now)
        except WorkbenchError as error:
            raise LawBroken(str(error)) from error
        self.now += STEP_SECONDS
        if plan is None:
            return None
        for sequence, _ in plan.errors:
            self.end(sequence, FinishReason.ERROR)
        self.scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans if span.needs_sample})
        for span in plan.spans:
            max_tokens = span.sequence.request.sampling.max_tokens
            if len(span.sequence.output_ids) >= max_tokens or len(span.sequence.token_ids) >= CONTEXT:
                self.end(span.sequence, FinishReason.LENGTH)
        return plan

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence, reason)
        self.unfinished.remove(sequence)


def play_scenario(scenario: PolicyScenario, policy: SchedulingPolicy) -> Iterator[tuple[ScheduleHarness, StepPlan]]:
    """Yield every step of a scenario until all requests have finished. Raises LawBroken if they never finish."""
    played, due, coming = ScheduleHarness.from_scenario(scenario, policy), 0, list(enumerate(scenario.arrivals))
    step, further = 0, 0  # the last step in which a request reached a new maximum
    most: dict[str, int] = {}
    while coming or played.unfinished:
        while coming and (due + coming[0][1].steps_after <= step or not played.unfinished):
            number, request = coming.pop(0)
            due = step
            played.submit(request, f"r{number}")
        if not played.unfinished:
            continue
        plan = played.step()
        if plan is None:
            raise LawBroken(f"nothing is planned while {len(played.unfinished)} requests are open, on {scenario}")
        yield played, plan
        step += 1
        for span in plan.spans:
            if span.end > most.get(span.sequence.request_id, 0):
                most[span.sequence.request_id], further = span.end, step
        if step - further > STALL_STEPS:
            name, preemptions = max(
                ((s.request_id, s.num_preemptions) for s in played.unfinished), key=lambda pair: pair[1]
            )
            raise LawBroken(
                f"no request advanced in {STALL_STEPS} steps: {name} was preempted {preemptions} times, on {scenario}"
            )
