"""Open replicas, or a prefill and a decode pool, as one kind of fleet: what a measurement of either needs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from workbench.cluster.cluster import Cluster
from workbench.cluster.launcher import StartedReplica
from workbench.cluster.pools import PrefillDecodePools
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError
from workbench.progress import AGAIN_SECONDS, report_if_slow, to_stderr
from workbench.request import Request
from workbench.simulate.executor_settings import ProcessesExecutor
from workbench.simulate.routers import LeastLoaded
from workbench.trace.events import Event

LOOK_SECONDS = 0.02  # between two looks whether all engines serve
DEAD_ALREADY = "executor.failures: instance {} is dead already and has no successor yet; kill it later"


class ProcessFleet(Protocol):
    """Engines in processes, numbered as a simulated fleet's instances: those of the decode pool last.

    `clock` is that of their events."""

    clock: Callable[[], float]

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Run requests, each at its time of arrival after now, and yield their events as they happen."""
        ...

    def kill(self, instance: int) -> None:
        """End the process of an instance at once by SIGKILL."""
        ...

    @property
    def is_whole(self) -> bool:
        """Return whether all engines serve."""
        ...

    def close(self) -> None: ...


class ReplicaFleet:
    """Whole engines behind a router; `kill` ends the process of one."""

    def __init__(self, cluster: Cluster, kill: Callable[[StartedReplica], None] | None = None):
        """Take the replicas that serve now as instances, the eldest as number 0; close the cluster with the fleet.

        `kill` ends a replica; by a SIGKILL to its process unless given."""
        self.clock = cluster.clock
        self.cluster, self._kill = cluster, kill or _kill_process
        self._places = sorted(cluster.replicas)  # the number of each instance's replica
        self._killed: set[int] = set()

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        return self.cluster.stream(list(requests))

    def kill(self, instance: int) -> None:
        """End the process of an instance: the replica that it began with, or that took its place.

        WorkbenchError where it has none, since a killed one's successor does not serve yet."""
        known = self.cluster.replicas
        news = sorted(known.keys() - set(self._places))
        for place, number in enumerate(self._places):
            if news and (number not in known or number in self._killed):
                self._places[place] = news.pop(0)
        number = self._places[instance]
        if number not in known or number in self._killed:
            raise WorkbenchError(DEAD_ALREADY.format(instance))
        self._killed.add(number)
        self._kill(known[number])

    @property
    def is_whole(self) -> bool:
        known = self.cluster.replicas
        return len(known) == len(self._places) and not self._killed & known.keys()

    def close(self) -> None:
        self.cluster.close()


class PoolFleet:
    """A prefill and a decode pool."""

    def __init__(self, pools: PrefillDecodePools):
        """Serve by `pools`, which `close` ends; their events are on this process's clock."""
        self.pools, self.clock = pools, time.perf_counter
        self._restarts: dict[int, int] = {}  # that follow kills, by place

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        return self.pools.stream(requests)

    def kill(self, instance: int) -> None:
        """End the process of an instance.

        WorkbenchError where it has none, since a killed one's successor has not started yet, or none that can be killed
        from here."""
        slot = self.pools.slots[instance]
        if slot.process is not None and slot.process.pid is None:
            raise WorkbenchError(f"instance {instance}: its process is on another machine; it cannot be killed here")
        if slot.process is None or slot.restarts < self._restarts.get(instance, 0):
            raise WorkbenchError(DEAD_ALREADY.format(instance))
        self._restarts[instance] = slot.restarts + 1
        self.pools.kill(instance)

    @property
    def is_whole(self) -> bool:
        return all(
            slot.state == "ready" and slot.restarts >= self._restarts.get(slot.number, 0) for slot in self.pools.slots
        )

    def close(self) -> None:
        self.pools.close()


OpenFleet = Callable[[EngineConfig, ProcessesExecutor, int], ProcessFleet]


def open_fleet(config: EngineConfig, executor: ProcessesExecutor, threads: int) -> ProcessFleet:
    """Start the engines that `executor` describes, of `threads` threads each; return when all can serve."""
    check_fleet(executor)
    if executor.decode is None:
        return ReplicaFleet(Cluster(config, executor.instances, executor.router, cpus=threads))
    decode = executor.decode
    made = PrefillDecodePools(config, executor.instances, decode.instances, transfer=decode.transfer, threads=threads,
                              max_restarts=2**31)  # fmt: skip
    return PoolFleet(made)


def check_fleet(executor: ProcessesExecutor) -> None:
    """Raise WorkbenchError for a fleet that there is not."""
    for each in executor.failures:
        if each.instance >= executor.num_engines:
            known = f"0 to {executor.num_engines - 1}"
            raise WorkbenchError(f"executor.failures: instance {each.instance}; there are {known}")
    if executor.decode is not None:
        for name, router in (("router", executor.router), ("decode.router", executor.decode.router)):
            if not isinstance(router, LeastLoaded):
                raise WorkbenchError(
                    f"executor.{name}: {router.kind}; pools give a request to the engine with the fewest: leave it out"
                )


def wait_until_whole(fleet: ProcessFleet, limit: float = 600.0) -> float:
    """Wait until all engines of a fleet serve; return the seconds that it took (WorkbenchError after `limit`)."""
    began = time.perf_counter()
    with report_if_slow("waiting for the successor of an engine", to_stderr, seconds=AGAIN_SECONDS, limit=limit):
        while not fleet.is_whole:
            if time.perf_counter() - began > limit:
                raise WorkbenchError(f"an engine that was killed has no successor after {limit:.0f} s")
            time.sleep(LOOK_SECONDS)
    return time.perf_counter() - began


def _kill_process(replica: StartedReplica) -> None:
    process = getattr(replica, "process_id", None)
    if process is None:
        raise WorkbenchError(f"replica {replica.number}: has no process of its own to be killed")
    os.kill(process, signal.SIGKILL)
