"""Small integer schedules for testing a policy: arrivals, pages, and the policy's decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from workbench.cache.holdings import Holdings
from workbench.cache.pages import PagePool
from workbench.cache.prefix import PrefixIndex
from workbench.cache.tables import Table
from workbench.engine.lawful import name_of
from workbench.engine.limits import Limits, Refusal
from workbench.engine.plan import StepPlan
from workbench.engine.policy import Policy, State, Wishes
from workbench.engine.scheduler import Scheduler
from workbench.errors import WorkbenchError
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.testing.report import Broken

SIZE, CONTEXT = 4, 48
STALLED = 100  # steps; enough to recompute preempted requests
TABLES = {
    "full": (Table(),),
    "full and window": (Table(), Table(back=5)),
    "sinks and window": (Table(back=6, first=3),),
    "packed": (Table(lag=5, group=2), Table(back=7)),
}


@dataclass(frozen=True)
class Coming:
    """One arriving request: steps after the previous one, and its sizes."""

    after: int
    prompt: int
    most: int
    priority: int = 0
    tenant: int = 0
    samples: int = 1

    def request(self, name: str) -> Request:
        # Prompts share a beginning, so that the prefix index has hits.
        ids = tuple(0 if i < 9 else hash((name, i)) % 7 for i in range(self.prompt))
        asked = SamplingParameters(max_tokens=self.most)
        return Request(name, ids, asked, priority=self.priority, tenant=f"tenant {self.tenant}")


@dataclass(frozen=True)
class PolicyScene:
    coming: tuple[Coming, ...]
    tables: str = "full"
    pages: int = 12
    seats: int = 4
    budget: int = 7
    chunked: bool = True
    prefix: bool = False

    def __repr__(self) -> str:
        asks = ", ".join(f"{c.prompt}+{c.most}" for c in self.coming)
        cut = "" if self.chunked else ", prefills whole"
        known = ", with a prefix index" if self.prefix else ""
        asks = f"requests of {asks} tokens, " if asks else ""
        return (
            f"{asks}{self.pages} pages of {SIZE} ({self.tables}), "
            f"max_num_seqs {self.seats}, max_num_batched_tokens {self.budget}{cut}{known}"
        )

    def scheduler(self, policy: Policy) -> Scheduler:
        tables = TABLES[self.tables]
        pools = tuple(PagePool(self.pages, SIZE) for _ in tables)
        index = PrefixIndex(pools, tables) if self.prefix else None
        limits = Limits(self.seats, self.budget, chunked_prefill=self.chunked)
        return Scheduler(Holdings(pools, tables, self.budget, index), limits, CONTEXT, policy)


def scenes() -> st.SearchStrategy[PolicyScene]:
    coming = st.builds(
        Coming, st.integers(0, 3), st.integers(1, 20), st.integers(1, 6), st.integers(0, 2), st.integers(0, 2),
        st.sampled_from([1, 1, 1, 2, 3]),
    )  # fmt: skip
    return st.builds(
        PolicyScene, st.lists(coming, min_size=1, max_size=5).map(tuple), st.sampled_from(list(TABLES)),
        st.integers(8, 16), st.integers(1, 4), st.integers(2, 9), st.booleans(), st.booleans(),
    )  # fmt: skip


@dataclass
class Played:
    """A scheduler at work on requests.

    `last_decision` is the state that the policy saw before this step, and its decision.
    """

    scheduler: Scheduler
    policy: Policy
    open: list[Sequence] = field(default_factory=list)
    count: int = 0
    asked: tuple[State, Wishes] | None = None

    @classmethod
    def of(cls, scene: PolicyScene, policy: Policy) -> Played:
        played = cls(scene.scheduler(policy), policy)
        played.scheduler.policy = played  # asked before every step, for it does not declare itself steady
        return played

    @property
    def kind(self) -> str:
        return name_of(self.policy)

    def __call__(self, state: State) -> Wishes:
        state = state.worked_out()
        wishes = self.policy(state)
        if isinstance(wishes, Wishes):  # its fields may be iterators
            wishes = Wishes(tuple(wishes.tokens), tuple(wishes.set_back), dict(wishes.because))
            self.asked = state, wishes
        return wishes

    def submit(self, coming: Coming, name: str) -> Sequence | None:
        """Queue a request; None where it could never run."""
        new = [
            Sequence.of(coming.request(f"{name}.{i}" if i else name), self.count + i) for i in range(coming.samples)
        ]
        try:
            self.scheduler.submit(new[0], new[1:])
        except Refusal:
            return None
        self.count += len(new)
        self.open += new
        return new[0]

    def step(self) -> StepPlan | None:
        """Run one step, and finish requests that reached their length. LawBroken where the policy gives no plan."""
        self.asked = None
        try:
            plan = self.scheduler.plan()
        except WorkbenchError as error:
            raise Broken(str(error)) from error
        if plan is None:
            return None
        for sequence, _ in plan.faults:
            self.end(sequence, FinishReason.ERROR)
        self.scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans if span.samples})
        for span in plan.spans:
            asked = span.sequence.request.sampling.max_tokens
            if len(span.sequence.output_ids) >= asked or len(span.sequence.token_ids) >= CONTEXT:
                self.end(span.sequence, FinishReason.LENGTH)
        return plan

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence, reason)
        self.open.remove(sequence)


def steps(scene: PolicyScene, policy: Policy) -> Iterator[tuple[Played, StepPlan]]:
    """Yield every step of a scenario until all requests have finished; LawBroken where they never do."""
    played, due, coming = Played.of(scene, policy), 0, list(enumerate(scene.coming))
    step, further = 0, 0  # the last step in which a request advanced further than before
    most: dict[str, int] = {}
    while coming or played.open:
        while coming and (due + coming[0][1].after <= step or not played.open):
            number, request = coming.pop(0)
            due = step
            played.submit(request, f"r{number}")
        if not played.open:
            continue
        plan = played.step()
        if plan is None:
            raise Broken(f"nothing is planned while {len(played.open)} requests are open, on {scene}")
        yield played, plan
        step += 1
        for span in plan.spans:
            if span.end > most.get(span.sequence.request_id, 0):
                most[span.sequence.request_id], further = span.end, step
        if step - further > STALLED:
            name, backs = max(((s.request_id, s.set_backs) for s in played.open), key=lambda pair: pair[1])
            raise Broken(f"nobody got further in {STALLED} steps: {name} was set back {backs} times, on {scene}")
