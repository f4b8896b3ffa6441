"""Define sources of traffic: arrivals at given times, and arrivals that follow the end of a request."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

from workbench.errors import WorkbenchError
from workbench.simulate.arrival import Arrival, scale_arrivals
from workbench.simulate.generators import HOURS, LENGTHS, TIMES
from workbench.simulate.trace_files import read_trace
from workbench.simulate.traffic_settings import AsRecorded, ClosedLoop, TrafficSettings

Name = TypeVar("Name", str, int, float | None)


class TrafficSource(Protocol):
    """The interface of a source of arrivals.

    `initial_arrivals` yields arrivals with given times, in order of time. `next_after_finish` is called once for each
    request that ends, with any outcome, and returns the arrival that follows at `time`, if any."""

    def initial_arrivals(self) -> Iterator[Arrival]: ...

    def next_after_finish(self, time: float) -> Arrival | None: ...


class OpenLoopSource:
    """A source of an open loop: requests arrive at given times, independently of answers."""

    def __init__(self, arrivals: Iterable[Arrival]):
        self._arrivals = arrivals

    def initial_arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def next_after_finish(self, time: float) -> Arrival | None:
        return None


class ClosedLoopSource:
    """A source of a closed loop: `clients` requests at second 0, and a new request `think_seconds` after each request
    has ended."""

    def __init__(self, arrivals: Iterable[Arrival], clients: int, think_seconds: float = 0.0):
        self._coming = iter(arrivals)
        self._clients, self._think = clients, think_seconds

    def initial_arrivals(self) -> Iterator[Arrival]:
        for arrival in itertools.islice(self._coming, self._clients):
            yield replace(arrival, time=0.0)

    def next_after_finish(self, time: float) -> Arrival | None:
        arrival = next(self._coming, None)
        return None if arrival is None else replace(arrival, time=time + self._think)


def source_of(workload: TrafficSettings) -> TrafficSource:
    """Return the source of a workload's traffic, which is deterministic. Raises WorkbenchError for traffic without
    times or an end."""
    arrivals, kind = (
        _with_predictions(
            scale_arrivals(_with_tenants(_lengths(workload), workload), workload.time, workload.length), workload
        ),
        workload.arrivals,
    )
    if isinstance(kind, ClosedLoop):
        return ClosedLoopSource(arrivals, kind.clients, kind.think * workload.time)
    if isinstance(kind, AsRecorded):
        return OpenLoopSource(arrivals)
    times = TIMES[type(kind)](kind, random.Random(f"{workload.seed}/times"))
    return OpenLoopSource(replace(a, time=time * workload.time) for a, time in zip(arrivals, times, strict=False))


def _with_tenants(arrivals: Iterator[Arrival], workload: TrafficSettings) -> Iterator[Arrival]:
    """Assign a tenant, a priority and a deadline to each request, independent of the number of requests."""
    if not (workload.tenants or workload.priorities or workload.deadlines):
        yield from arrivals
        return
    for number, arrival in enumerate(arrivals):
        who = f"session {arrival.session}" if arrival.session else f"request {number}"
        yield replace(
            arrival,
            tenant=_drawn(workload.tenants, f"{workload.seed}/tenants/{who}", arrival.tenant),
            priority=_drawn(workload.priorities, f"{workload.seed}/priorities/{number}", arrival.priority),
            deadline=_drawn(workload.deadlines, f"{workload.seed}/deadlines/{number}", arrival.deadline),
        )


def _with_predictions(arrivals: Iterator[Arrival], workload: TrafficSettings) -> Iterator[Arrival]:
    """Predict each output's length with an error, independent of the number of requests."""
    error = workload.prediction_error
    for number, arrival in enumerate(arrivals):
        if error is not None:
            factor = math.exp(error * random.Random(f"{workload.seed}/predictions/{number}").gauss(0, 1))
            arrival = replace(arrival, predicted_tokens=max(1, round(factor * arrival.output_tokens)))
        yield arrival


def _drawn(shares: Mapping[Name, float], seed: str, other: Name) -> Name:
    return random.Random(seed).choices(list(shares), list(shares.values()))[0] if shares else other


def _lengths(workload: TrafficSettings) -> Iterator[Arrival]:
    recorded_times = isinstance(workload.arrivals, AsRecorded)
    if workload.trace is not None:
        return itertools.islice(read_trace(workload.trace), workload.requests)
    part = workload.lengths
    hour = HOURS.get(type(part))
    if hour is None and (recorded_times or workload.requests is None):
        missing = "arrivals: give poisson, bursts, at_once or closed_loop" if recorded_times else "requests: give one"
        raise WorkbenchError(f"workload.{missing}, for lengths {part.kind!r} have no times and no end of their own")
    made = LENGTHS[type(part)](part, random.Random(f"{workload.seed}/lengths"))
    if workload.requests is not None:
        return itertools.islice(made, workload.requests)
    return itertools.takewhile(lambda arrival: arrival.time <= (hour or 0.0), made)
