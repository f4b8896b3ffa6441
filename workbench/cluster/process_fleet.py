"""Open replicas, or a prefill and a decode pool, behind one interface that measurements use."""

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

LOOK_SECONDS = 0.02  # polling interval until all engines serve
DEAD_ALREADY = "executor.failures: instance {} is dead already and has no successor yet; kill it later"


class ProcessFleet(Protocol):
    """Engines in processes, numbered like a simulated fleet's instances, the decode pool last.

    `clock` is the clock of their events."""

    clock: Callable[[], float]

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Run requests, each `arrival` seconds from now, and yield their events as they happen."""
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
    """Replicas behind a router, each a whole engine; `kill` ends the process of one replica."""

    def __init__(self, cluster: Cluster, kill: Callable[[StartedReplica], None] | None = None):
        """Number the replicas that serve now as instances, the oldest first; close the cluster with the fleet.

        `kill` ends a replica; default: SIGKILL to its process."""
        self.clock = cluster.clock
        self.cluster, self._kill = cluster, kill or _kill_process
        self._places = sorted(cluster.replicas)  # replica number by instance
        self._killed: set[int] = set()

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        return self.cluster.stream(list(requests))

    def kill(self, instance: int) -> None:
        """Kill the process of an instance: of its first replica, or of the replica that replaced it.

        WorkbenchError if the successor of a killed replica does not serve yet."""
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
        """Serve with `pools`, which `close` ends; their events are on this process's clock."""
        self.pools, self.clock = pools, time.perf_counter
        self._restarts: dict[int, int] = {}  # expected restarts by slot

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        return self.pools.stream(requests)

    def kill(self, instance: int) -> None:
        """Kill the process of an instance.

        WorkbenchError if the successor of a killed process has not started yet, or the process cannot be killed from
        this host."""
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
    made = PrefillDecodePools(config, executor.instances, decode.instances, transfer=decode.transfer, threads=threads)
    return PoolFleet(made)


def check_fleet(executor: ProcessesExecutor) -> None:
    """Raise WorkbenchError for settings that no fleet supports."""
    for each in executor.failures:
        if each.instance >= executor.num_engines:
            known = f"0 to {executor.num_engines - 1}"
            raise WorkbenchError(f"executor.failures: instance {each.instance}; there are {known}")
    if executor.decode is not None:
        for name, router in (("router", executor.router), ("decode.router", executor.decode.router)):
            if not isinstance(router, LeastLoaded):
                raise WorkbenchError(
                    f"executor.{name}: {router.kind}; pools choose the engine with the fewest requests: leave it out"
                )


def wait_until_whole(fleet: ProcessFleet, limit: float = 600.0) -> float:
    """Wait until all engines of a fleet serve; return the seconds it took (WorkbenchError after `limit` seconds)."""
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
