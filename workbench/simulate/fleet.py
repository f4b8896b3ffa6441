"""Simulate a fleet of instances under one clock: requests arrive and are routed, computed, handed over, retried, and
finished.

    arrival -> router -> instance (prefill, and decode where there is one pool) -> ended
                             |  keys and values over the network
                             +--> router of the decode pool -> instance -> ended        a failure: back to the router

Events of one moment happen in a fixed order: steps end, instances fail and recover, transfers complete, requests
arrive; then idle instances plan their next step. Nothing depends on wall time or on a hash seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workbench.errors import WorkbenchError
from workbench.simulate.arrival import Arrival
from workbench.simulate.instance import Instance, InstanceSpec, PlannedSteps
from workbench.simulate.job import SimulatedRequest, symbolic_prompt
from workbench.simulate.routers import AnyRouter, LeastLoaded
from workbench.simulate.source import TrafficSource
from workbench.simulate.step_times import TICKS_PER_SECOND

STEP, FAILURE, HANDOVER, ARRIVAL = range(4)
NO_INSTANCE_LEFT = "no instance left: all instances that could serve it have failed for good"
Prompts = Callable[[Arrival, int], tuple[int, ...]]


@dataclass(frozen=True)
class InstancePool:
    """A pool of `count` equal instances, and the router that chooses among them."""

    spec: InstanceSpec
    count: int
    router: AnyRouter = LeastLoaded()


@dataclass(frozen=True)
class KVTransfer:
    """The cost of sending keys and values to another instance. The sender's pages become free when the transfer
    begins."""

    bytes_per_second: float = 50e9
    latency: float = 0.0  # seconds


@dataclass(frozen=True)
class InstanceFailure:
    """Failure of instance `instance` at second `at`.

    The instance recovers `downtime` seconds later with an empty cache, or never. Where no other instance can take them,
    its requests and later ones fail."""

    instance: int
    at: float
    downtime: float | None = None


class FleetListener(Protocol):
    """Callbacks for the events of a fleet, each called after its event."""

    def on_arrival(self, job: SimulatedRequest) -> None: ...

    def on_routed(
        self, job: SimulatedRequest, time: int, chosen: Instance, up: Sequence[Instance], router: AnyRouter
    ) -> None: ...

    def on_steps(self, instance: Instance, move: PlannedSteps) -> None: ...

    def on_handover(self, job: SimulatedRequest, target: Instance, time: int, size: int, ticks: int) -> None: ...

    def on_finish(self, job: SimulatedRequest) -> None: ...


class Fleet:
    """A simulated fleet: one pool for everything, or a prefill pool and a decode pool.

    Instances are numbered through, those of the decode pool last.

    Args:
        source: The traffic.
        pool: Instances that serve everything, or with `decode` only prompts and first tokens.
        decode: Instances that decode after a KV transfer; None for a single pool.
        transfer: Cost of a KV transfer.
        failures: Planned failures.
        prompts: Returns the token ids of a request; only a prefix cache reads them.
        single_step: Advance every step alone instead of fast-forwarding, as a check.
        listener: Receives the events; None for none.
    """

    def __init__(
        self,
        source: TrafficSource,
        pool: InstancePool,
        decode: InstancePool | None = None,
        *,
        transfer: KVTransfer = KVTransfer(),  # noqa: B008 (a frozen value)
        failures: Sequence[InstanceFailure] = (),
        prompts: Prompts = symbolic_prompt,
        single_step: bool = False,
        listener: FleetListener | None = None,
    ):
        self.source, self.transfer = source, transfer
        self.pools = (pool,) if decode is None else (pool, decode)
        self.instances: list[Instance] = []
        self.of_pool: list[list[Instance]] = []
        for each in self.pools:
            begin = len(self.instances)
            machines = range(begin, begin + each.count)
            moved = listener.on_steps if listener is not None else None
            made = [Instance(each.spec, n, single_step=single_step, on_steps=moved) for n in machines]
            self.of_pool.append(made)
            self.instances += made
        self.jobs: list[SimulatedRequest] = []
        self.now = 0
        self.finished = self.failed = 0
        self.handed_over = self.sent_bytes = 0  # sequences, bytes sent between pools
        self.stranded: list[
            tuple[SimulatedRequest, Callable[[SimulatedRequest], None]]
        ] = []  # requests without an instance that is up, each with the call that retries it
        self.on_the_way: dict[int, SimulatedRequest] = {}  # in transfer between pools
        self._prompts, self._listener = prompts, listener
        self._events: list[tuple[int, int, int, int, Any]] = []  # (time, kind, index, insertion order, payload)
        self._pushed = 0
        self._arrivals: Iterator[Arrival] = source.initial_arrivals()
        self._coming = 0
        self._next_arrival()
        for failure in failures:
            if not 0 <= failure.instance < len(self.instances):
                known = f"0 to {len(self.instances) - 1}"
                raise WorkbenchError(f"failure of instance {failure.instance}: there are {known}")
            self._push(_ticks(failure.at), FAILURE, failure.instance, failure)

    @property
    def submitted(self) -> int:
        return len(self.jobs)

    @property
    def in_flight(self) -> int:
        return self.submitted - self.finished - self.failed

    def run(self, until: float | None = None) -> Fleet:
        """Simulate up to second `until`, or to the end."""
        last = None if until is None else _ticks(until)
        while self._events and (last is None or self._events[0][0] <= last):
            self.advance()
        return self

    def advance(self) -> bool:
        """Simulate all events of the next moment; return False if no event is left."""
        if not self._events:
            return False
        now = self.now = self._events[0][0]
        while self._events and self._events[0][0] == now:
            _, kind, which, _, what = heapq.heappop(self._events)
            if kind == STEP:
                self._step(self.instances[which], what)
            elif kind == FAILURE:
                self._failure(self.instances[which], what)
            elif kind == HANDOVER:
                self._handed_over(*what)
            else:
                self._arrive(what)
        for instance in self.instances:
            if instance.up and instance.current is None and instance.jobs:
                self._start(instance)
        return True

    def _push(self, time: int, kind: int, which: int, what: object) -> None:
        heapq.heappush(self._events, (time, kind, which, self._pushed, what))
        self._pushed += 1

    def _next_arrival(self, arrival: Arrival | None = None) -> None:
        """Schedule `arrival`, or the next one of the traffic, at its time."""
        own = arrival is None
        arrival = next(self._arrivals, None) if arrival is None else arrival
        if arrival is not None:
            self._push(max(self.now, _ticks(arrival.time)), ARRIVAL, self._coming, (arrival, own))
            self._coming += 1

    def _arrive(self, what: tuple[Arrival, bool]) -> None:
        arrival, own = what
        if own:
            self._next_arrival()
        number = len(self.jobs)
        job = SimulatedRequest(number, f"request-{number}", arrival, self.now, arrival.output_tokens)
        job.prompt = self._prompts(arrival, number)
        room = min(pool.spec.context for pool in self.pools) - arrival.prompt_tokens
        job.output_tokens = max(1, min(job.output_tokens, room))
        self.jobs.append(job)
        if self._listener is not None:
            self._listener.on_arrival(job)
        self._route(job)

    def _route(self, job: SimulatedRequest) -> None:
        """Submit the request to an instance that computes its prompt."""
        if up := self._available(0, job, self._route):
            job.tokens_on_instance = job.output_tokens if len(self.pools) == 1 else job.generated_tokens + 1
            self._submit(job, self._chosen(0, job, up), False)

    def _available(self, pool: int, job: SimulatedRequest, again: Callable[[SimulatedRequest], None]) -> list[Instance]:
        """Return the instances of `pool` that are up. If there are none, `job` waits for a recovery, or fails."""
        up = [instance for instance in self.of_pool[pool] if instance.up]
        if not up and all(instance.removed for instance in self.of_pool[pool]):
            job.error = NO_INSTANCE_LEFT
            self._end(job)
        elif not up:
            self.stranded.append((job, again))
        return up

    def _submit(self, job: SimulatedRequest, instance: Instance, handed_over: bool) -> None:
        moving = instance.current
        refused = instance.submit(job, self.now, handed_over)
        if refused:
            job.error = refused
            self._end(job)
        elif moving is not None:
            self._push(moving.end, STEP, instance.number, moving)

    def _chosen(self, pool: int, job: SimulatedRequest, up: list[Instance]) -> Instance:
        router = self.pools[pool].router
        chosen = self.instances[router.choose(job, up).number]
        if self._listener is not None and len(self.instances) > 1:
            self._listener.on_routed(job, self.now, chosen, up, router)
        return chosen

    def _start(self, instance: Instance) -> None:
        for job in instance.start(self.now):
            self._end(job)
        if instance.current is not None:
            self._push(instance.current.end, STEP, instance.number, instance.current)

    def _step(self, instance: Instance, move: PlannedSteps) -> None:
        if instance.current is not move or move.end != self.now:
            return  # outdated: the series was cut short, or the instance failed
        for job in instance.finish():
            if job.generated_tokens >= job.output_tokens:
                self._end(job)
            else:
                self._hand_over(job)

    def _hand_over(self, job: SimulatedRequest) -> None:
        """Send the keys and values to an instance of the decode pool, chosen now."""
        up = self._available(1, job, self._hand_over)
        if not up:
            return
        instance = self._chosen(1, job, up)
        size = round((job.num_tokens - 1) * self.pools[0].spec.kv_bytes_per_token)
        self.handed_over += 1
        self.sent_bytes += size
        self.on_the_way[job.number] = job
        ticks = _ticks(size / self.transfer.bytes_per_second + self.transfer.latency)
        self._push(self.now + ticks, HANDOVER, job.number, (job, instance, instance.incarnation, size, ticks))

    def _handed_over(self, job: SimulatedRequest, instance: Instance, incarnation: int, size: int, ticks: int) -> None:
        del self.on_the_way[job.number]
        if not instance.up or instance.incarnation != incarnation:
            job.retries += 1
            self._route(job)  # the transfer is lost
            return
        if self._listener is not None:
            self._listener.on_handover(job, instance, self.now, size, ticks)
        job.tokens_on_instance = job.output_tokens
        self._submit(job, instance, True)

    def _failure(self, instance: Instance, what: InstanceFailure | None) -> None:
        """Fail the instance by failure `what`; if `what` is None, let it recover."""
        if what is None:
            instance.recover(self.now)
            waiting, self.stranded = self.stranded, []
            for job, again in waiting:
                again(job)
        elif instance.up:
            instance.removed = what.downtime is None
            if what.downtime is not None:
                self._push(self.now + max(1, _ticks(what.downtime)), FAILURE, instance.number, None)
            for job in instance.fail(self.now):
                job.retries += 1
                self._route(job)

    def _end(self, job: SimulatedRequest) -> None:
        job.finish_time, job.prompt = self.now, ()
        if job.error:
            self.failed += 1
        else:
            self.finished += 1
        if self._listener is not None:
            self._listener.on_finish(job)
        following = self.source.next_after_finish(self.now / TICKS_PER_SECOND)
        if following is not None:
            self._next_arrival(following)


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_SECOND)
