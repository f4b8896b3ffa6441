"""One simulated instance: the project's own scheduler and cache, driven by an integer clock instead of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from workbench.cache.pages import NULL_PAGE, pages_for
from workbench.engine.plan import StepPlan
from workbench.engine.scheduler import Refusal, Scheduler
from workbench.engine.stretch import ahead, alike
from workbench.fleet.job import Job
from workbench.fleet.machine import Machine
from workbench.fleet.work import SECOND, Run, work_of
from workbench.request import FinishReason, Request, SamplingParameters, Saved, Sequence

NO_TOKEN = -(2**40)  # placeholder of tokens, which no model samples


@dataclass
class Move:
    """A series of equal steps planned at once; `plan` is the first one's."""

    plan: StepPlan
    run: Run
    begun: int
    steps: int

    @property
    def end(self) -> int:
        return self.begun + self.run.elapsed(self.steps)


@dataclass
class Tally:
    """Sums over the steps of one instance."""

    steps: int = 0
    moves: int = 0
    busy: int = 0  # ticks
    rows: int = 0  # sequences, summed over steps
    most_rows: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    stored: int = 0  # tokens in the cache, summed over steps
    reserved: int = 0  # tokens that the pages of those sequences could hold


class Instance:
    """A simulated instance. `start` plans a series of steps, which ends by itself or is cut short by a new request;
    `finish` commits it.

    Args:
        spec: The instance's cache, limits and step times.
        number: Its index in the fleet.
        single_step: Advance every step alone, as a check.
        on_steps: Called with each finished series before its requests leave.
    """

    def __init__(
        self,
        machine: Machine,
        number: int,
        *,
        one_by_one: bool = False,
        moved: Callable[[Instance, Move], None] | None = None,
    ):
        self.machine, self.number, self.one_by_one, self.moved = machine, number, one_by_one, moved
        self.now = 0
        self.up, self.incarnation = True, 0
        self.gone = False  # permanently: it is not up and never recovers
        self.move: Move | None = None
        self.tally = Tally()
        self.jobs: dict[str, Job] = {}
        self.scheduler: Scheduler = machine.scheduler(self._clock)
        self._orders = 0
        self._came_over: set[str] = set()

    @property
    def requests(self) -> int:
        return len(self.jobs)

    @property
    def backlog(self) -> int:
        """Return the prompt tokens that are still to be computed here."""
        waiting = sum(s.waiting_tokens - 1 for s in self.scheduler.waiting if s.saved is None)
        return waiting + sum(s.waiting_tokens - 1 for s in self.scheduler.running)

    def cached(self, prompt: tuple[int, ...], tenant: str) -> int:
        """Return the tokens of a prompt that are in the prefix cache."""
        index = self.scheduler.holdings.prefix
        return index.match(prompt, tenant).tokens if index is not None else 0

    def submit(self, job: Job, now: int, handed_over: bool = False) -> str:
        """Submit a request, with its keys and values if it was `handed_over`.

        Returns the reason of a refusal, or "" if it was accepted."""
        self.now = now
        sampling = _sampling(job.until)
        tenant, priority = job.arrival.tenant, job.arrival.priority
        request = Request(job.name, job.prompt, sampling, cache_salt=tenant, priority=priority, tenant=tenant)
        sequence = Sequence(request, self._orders, [*job.prompt, *(NO_TOKEN - job.number,) * job.produced])
        self._orders += 1
        if handed_over:
            sequence.saved = self._brought(len(sequence.token_ids) - 1)
            self._came_over.add(job.name)
        try:
            self.scheduler.submit(sequence)
        except Refusal as refusal:
            if sequence.saved is not None:
                self.scheduler.holdings.host.release(sequence.saved)
            return str(refusal)
        self.jobs[job.name] = job
        job.places.append(self.number)
        if self.move is not None:  # the request joins at the end of the running step
            self.move.steps = max(1, self.move.run.until(now - self.move.begun, self.move.steps))
        return ""

    def start(self, now: int) -> list[Job]:
        """Plan and begin the next series of steps, if there is anything to do.

        Returns the requests that end now with an error: those for which the policy decided something invalid."""
        self.now = now
        broken: list[Job] = []
        decisions, moving = (), 0
        while (plan := self.scheduler.plan()) is not None:
            decisions, moving = (*decisions, *plan.decisions), moving + self._moving(plan)
            for decision in plan.decisions:
                if decision.action == "admitted" and (job := self.jobs[decision.request_id]).first_scheduled is None:
                    job.first_scheduled = now
            for sequence, fault in plan.faults:
                self.scheduler.finish(sequence, FinishReason.ERROR)
                broken.append(self._leave(sequence))
                broken[-1].error = fault
            if broken:
                plan = replace(plan.going(), decisions=decisions)
            if plan.spans:
                self.move = self._begin(plan, moving)
                break
        return broken

    def _begin(self, plan: StepPlan, moving: int) -> Move:
        """Build the series that begins with `plan`; swapping pages takes `swap_ticks` ticks."""
        times = self.machine.times
        spans = [(s.start, s.length) for s in plan.spans] + [(0, 1)] * plan.padding
        work = work_of(spans, sum(s.samples for s in plan.spans) + plan.padding, times.kinds)
        steps, rows = (1, ()) if self.one_by_one else self._alike(plan)
        return Move(plan, times.run(work, rows, moving), self.now, steps)

    def finish(self) -> list[Job]:
        """Commit the current series and return the requests that leave with it."""
        move, self.move = self.move, None
        assert move is not None
        self.now = move.end
        self._count(move)
        plan = ahead(self.scheduler, move.plan, move.steps, NO_TOKEN)
        first, longest = move.run.elapsed(1), move.run.last(move.steps)
        chosen, done = {}, []
        for span in plan.spans:
            if span.samples:
                job = self.jobs[span.sequence.request_id]
                chosen[job.name] = NO_TOKEN - job.number
                job.tokens(move.steps, move.begun + first, longest, self.now)
                if job.produced >= job.until:
                    done.append(span.sequence)
        self.scheduler.commit(plan, chosen)
        if self.moved is not None:
            self.moved(self, move)
        for sequence in done:
            self.scheduler.finish(sequence, FinishReason.LENGTH)
        return [self._leave(sequence) for sequence in done]

    def fail(self, now: int) -> list[Job]:
        """Fail the instance and return its requests, with the tokens of the steps completed by then."""
        if self.move is not None:
            self.move.steps = self.move.run.until(now - self.move.begun + 1, self.move.steps) - 1
            if self.move.steps:
                self.finish()
        self.move, self.now, self.up = None, now, False
        here = [sequence for queue in (self.scheduler.running, self.scheduler.waiting) for sequence in queue]
        return sorted((self._leave(sequence) for sequence in here), key=lambda job: job.number)

    def recover(self, now: int) -> None:
        """Restart the instance with an empty cache."""
        self.now, self.up, self.incarnation = now, True, self.incarnation + 1
        self.scheduler, self._came_over = self.machine.scheduler(self._clock), set()

    def _clock(self) -> float:
        return self.now / SECOND

    def _alike(self, plan: StepPlan) -> tuple[int, tuple[int, ...]]:
        """Return the number of steps planned like this one, and by attention reach the number of queries whose context
        still grows."""
        steps, rows = alike(self.scheduler, plan), []
        if steps == 1:
            return 1, ()
        for span in plan.spans:
            job = self.jobs[span.sequence.request_id]
            steps = min(steps, job.until - job.produced)
        for kind in self.machine.times.kinds:
            left = [kind.most - s.end for s in plan.spans if s.end < kind.most] if kind.most is not None else None
            rows.append(len(plan.spans) if left is None else len(left))
            steps = min([steps, *(left or ())])
        return steps, tuple(rows)

    def _moving(self, plan: StepPlan) -> int:
        """Return the ticks of swapping pages to and from CPU memory; pages received from another instance are here
        already."""
        if not plan.moves:
            return 0
        moved = sum(self.machine.page_bytes[t] for t, _, _ in plan.moves.saves)
        moved += sum(self.machine.page_bytes[t] for n, t, _, _ in plan.moves.loads if n not in self._came_over)
        self._came_over.difference_update(name for name, _, _, _ in plan.moves.loads)
        return round(moved * self.machine.host)

    def _brought(self, computed: int) -> Saved | None:
        """Allocate pages for a received sequence; None if there are too few, so that it is computed again."""
        rooms, size = self.scheduler.holdings.host.rooms, self.machine.page_size
        wanted = []
        for table in self.machine.tables:
            dead = table.dead(computed, size)
            wanted.append([place not in dead for place in range(pages_for(table.settled(computed), size))])
        if any(sum(live) > room.free for live, room in zip(wanted, rooms, strict=True)):
            return None
        places = []
        for live, room in zip(wanted, rooms, strict=True):
            mine = room.allocate(sum(live))
            places.append([mine.pop() if lives else NULL_PAGE for lives in live])
        return Saved(computed, tuple(places))

    def _leave(self, sequence: Sequence) -> Job:
        job = self.jobs.pop(sequence.request_id)
        job.cached_tokens += sequence.cached_tokens
        job.computed_tokens += sequence.computed_tokens
        job.written_tokens += sequence.written_tokens
        job.set_backs += sequence.set_backs
        return job

    def _count(self, move: Move) -> None:
        tally, plan, steps = self.tally, move.plan, move.steps
        rows, pool = len(plan.spans), self.scheduler.pools[0]
        tally.steps += steps
        tally.moves += 1
        tally.busy += move.run.elapsed(steps)
        tally.rows += rows * steps
        tally.most_rows = max(tally.most_rows, rows)
        decodes = plan.decode_tokens
        tally.decode_tokens += decodes * steps
        tally.prefill_tokens += plan.tokens - decodes
        stored = sum(sequence.computed for sequence in self.scheduler.running) + plan.tokens
        tally.stored += stored * steps + rows * (steps * (steps - 1) // 2)
        tally.reserved += pool.used * pool.page_size * steps


@lru_cache(maxsize=4096)
def _sampling(tokens: int) -> SamplingParameters:
    return SamplingParameters(max_tokens=tokens, ignore_eos=True)
