"""A measured fleet's kills: they meet the instance that was named, and one that cannot is heard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.helpers.stand_in import stand_in
from workbench.cluster.apart.pool_processes import EngineProcess
from workbench.cluster.apart.pool_slots import Slot
from workbench.cluster.cluster import Cluster
from workbench.cluster.launcher import StartedReplica
from workbench.cluster.pools import PrefillDecodePools
from workbench.cluster.process_fleet import PoolFleet, ReplicaFleet
from workbench.errors import WorkbenchError
from workbench.measure.processes.stream import serve_traffic
from workbench.request import Request
from workbench.simulate.executor_settings import KillSettings
from workbench.trace.events import Event


class FewReplicas:
    """A cluster that is its replicas' numbers; `killed` ones stay in it until they are deleted."""

    def __init__(self, *numbers: int):
        self.replicas = {number: stand_in(StartedReplica, number=number) for number in numbers}
        self.cluster = stand_in(Cluster, replicas=self.replicas, clock=lambda: 0.0)
        self.killed: list[int] = []

    def kill(self, replica: StartedReplica) -> None:
        self.killed.append(replica.number)


def test_a_kill_meets_the_instance_in_its_place() -> None:
    cluster = FewReplicas(1, 2)
    fleet = ReplicaFleet(cluster.cluster, cluster.kill)
    fleet.kill(0)
    with pytest.raises(WorkbenchError, match="instance 0 is dead already"):
        fleet.kill(0)  # it was not noticed yet
    del cluster.replicas[1]
    with pytest.raises(WorkbenchError, match="instance 0 is dead already"):
        fleet.kill(0)
    fleet.kill(1)  # while the successor of instance 0 starts
    assert cluster.killed == [1, 2] and not fleet.is_whole
    del cluster.replicas[2]
    cluster.replicas |= FewReplicas(3, 4).replicas
    assert fleet.is_whole
    fleet.kill(1)
    fleet.kill(0)
    assert cluster.killed == [1, 2, 4, 3]


def test_a_kill_that_fails_ends_the_run_with_its_error() -> None:
    class Fleet(ReplicaFleet):
        def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
            tried.wait()
            yield from ()

    tried = threading.Event()

    def kill(replica: StartedReplica) -> None:
        tried.set()
        raise WorkbenchError(f"replica {replica.number}: has no process")

    fleet = Fleet(FewReplicas(1, 2).cluster, kill)
    with pytest.raises(WorkbenchError, match="replica 2: has no process"):
        serve_traffic(fleet, [], [KillSettings(instance=1, at=0)])


@pytest.mark.parametrize("pid", [None, 7])
def test_a_kill_in_pools_without_a_process_is_refused(pid: int | None) -> None:
    """No successor would come of it, for which a measurement would wait."""
    slot = stand_in(Slot, number=0, state="ready", restarts=0, process=stand_in(EngineProcess, pid=pid))
    killed: list[int] = []
    fleet = PoolFleet(stand_in(PrefillDecodePools, slots=[slot], kill=killed.append))
    if pid is None:
        with pytest.raises(WorkbenchError, match="instance 0: its process is on another machine"):
            fleet.kill(0)
        assert not killed and fleet.is_whole
        return
    fleet.kill(0)
    for process in (slot.process, None):  # its death was not noticed yet; its successor starts
        slot.process = process
        with pytest.raises(WorkbenchError, match="instance 0 is dead already"):
            fleet.kill(0)
    slot.restarts, slot.process = 1, stand_in(EngineProcess, pid=8)
    assert killed == [0] and fleet.is_whole


class IdleFleet(ReplicaFleet):
    """A fleet whose traffic ends once `ends` is set; its clock is the machine's."""

    def __init__(self, cluster: FewReplicas, kill: Callable[[StartedReplica], None]):
        super().__init__(cluster.cluster, kill)
        self.clock, self.ends = time.perf_counter, threading.Event()

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        self.ends.wait()
        yield from ()


def test_a_kill_after_the_end_of_the_traffic_is_reported() -> None:
    cluster = FewReplicas(1, 2)
    fleet = IdleFleet(cluster, cluster.kill)
    fleet.ends.set()
    with pytest.raises(WorkbenchError, match=r"instance 1 at 3000 s; the traffic ended after \d+\.\d+ s"):
        serve_traffic(fleet, [], [KillSettings(instance=1, at=3000)])
    assert not cluster.killed


def test_a_kill_under_way_ends_before_the_traffic_is_returned() -> None:
    def kill(replica: StartedReplica) -> None:
        fleet.ends.set()
        time.sleep(0.2)
        killed.append(replica.number)

    killed: list[int] = []
    fleet = IdleFleet(FewReplicas(1, 2), kill)
    serve_traffic(fleet, [], [KillSettings(instance=1, at=0)])
    assert killed == [2]
