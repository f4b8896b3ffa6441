"""Fleets of processes without processes: engines in threads, and a fleet whose events are the simulator's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.cluster.pool_threads import StartThreads
from tests.cluster.threads import Threads, demo
from workbench.cluster.cluster import Cluster
from workbench.cluster.pools import PrefillDecodePools
from workbench.cluster.process_fleet import PoolFleet, ProcessFleet, ReplicaFleet
from workbench.engine.config import EngineConfig
from workbench.engine.inputs import arrival
from workbench.measure.processes.traffic import FleetTraffic
from workbench.progress import discard
from workbench.request import Request
from workbench.simulate.events import FleetEventAdapter
from workbench.simulate.executor_settings import ProcessesExecutor
from workbench.simulate.fleet import Fleet, InstancePool
from workbench.simulate.instance import Instance, InstanceSpec, PlannedSteps
from workbench.simulate.source import OpenLoopSource
from workbench.trace.events import Event


def open_threads(config: EngineConfig, executor: ProcessesExecutor, threads: int) -> ProcessFleet:
    """Open a fleet whose engines are threads of this process; a replica's death is a word."""
    if executor.decode is None:
        launcher = Threads()
        made = Cluster(config, executor.instances, executor.router, launcher=launcher, report=discard)
        return ReplicaFleet(made, lambda replica: replica.die())  # type: ignore[attr-defined] (a ThreadReplica)
    pools = PrefillDecodePools(
        config, executor.instances, executor.decode.instances, processes=StartThreads(lambda asked: demo())
    )
    return PoolFleet(pools)


class _Numbered(FleetEventAdapter):
    """Events that name their instance, from 1 on."""

    def __init__(self, events: list[Event]):
        super().__init__(lambda event: events.append(replace(event, replica=self.number)))
        self.number = 0

    def on_steps(self, instance: Instance, move: PlannedSteps) -> None:
        self.number = instance.number + 1
        super().on_steps(instance, move)
        self.number = 0


class ClockedFleet:
    """A fleet that serves on a clock of its own: every event is the simulator's, at its second. A message to an engine
    takes `message` seconds."""

    def __init__(self, spec: InstanceSpec, executor: ProcessesExecutor, message: float):
        self._spec, self._executor, self._message = spec, executor, message
        self._now, self.is_whole = 0.0, True

    def clock(self) -> float:
        return self._now

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        asked, events, began = sorted(requests, key=arrival), [], self._now
        arrivals = FleetTraffic(tuple(asked)).arrivals.values()
        pool, decode = InstancePool(self._spec, self._executor.instances, self._executor.router), None
        if (its := self._executor.decode) is not None:
            decode = InstancePool(replace(self._spec, receives_kv=True), its.instances, its.router)
        coming = OpenLoopSource([replace(each, time=each.time + self._message) for each in arrivals])
        Fleet(coming, pool, decode, listener=_Numbered(events)).run()
        names = {f"request-{number}": each.request_id for number, each in enumerate(asked)}
        for event in sorted(events, key=lambda event: event.time):
            self._now = began + event.time
            yield replace(event, request_id=names.get(event.request_id, ""), time=self._now)

    def kill(self, instance: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass
