"""Replicas in processes: a real Ray on this machine, a SIGKILL in mid-answer, the server in front."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.killed import check_cancelled_start, check_killed_replica
from tests.cluster.processes import descendants, is_alive
from tests.cluster.threads import CONFIG, alone
from tests.helpers.processes import PIPE, python, start_python
from tests.helpers.ray_cluster import own_ray
from tests.patience import until
from workbench.cluster.cluster import Cluster
from workbench.cluster.front_watch import FrontWatch
from workbench.cluster.ray_replicas import OBJECT_STORE_BYTES, SOCKET_FOLDER, RayLauncher, check_reachable
from workbench.errors import WorkbenchError


@pytest.fixture(scope="module")
def cluster(ray_cluster: Any) -> Iterator[Cluster]:
    made = Cluster(CONFIG, 2, "least_loaded", address="local", cpus=1)
    processes = [each.process_id for each in made.replicas.values()]  # type: ignore[attr-defined] (of a process)
    yield made
    processes += [each.process_id for each in made.replicas.values()]  # type: ignore[attr-defined] (of a process)
    made.close()
    until(lambda: not any(map(is_alive, processes)))


@pytest.mark.smoke
def test_a_killed_replica_costs_no_token(cluster: Cluster) -> None:
    check_killed_replica(cluster)
    assert cluster.pages.used == 0


def test_a_replica_can_be_asked(cluster: Cluster) -> None:
    for number in cluster.replicas:
        assert cluster.call(lambda runner: runner.model.spec.vocab_size, number) == cluster.model.spec.vocab_size


def test_a_start_is_cancelled_while_its_model_loads(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_cancelled_start(RayLauncher(None, 1, 0, 1), monkeypatch)


ALONE = """
import sys
from tests.cluster.threads import CONFIG
from workbench.cluster.cluster import Cluster

if __name__ == "__main__":
    cluster = Cluster(CONFIG, 1, address="local", cpus=1)
    next(cluster.stream("def fib(n):", max_tokens=200, ignore_eos=True))
    print("serving", flush=True)
    sys.stdin.read()
"""


@own_ray
def test_nothing_outlives_its_front() -> None:
    """After a SIGKILL of the front no process is left, and no folder for temporary files."""
    with start_python("-c", ALONE, stdin=PIPE, stdout=PIPE) as front:
        try:
            assert any(line == "serving\n" for line in front.stdout)
            processes = descendants(front.pid)
            assert len(processes) > 2  # Ray's own, and the replica
            folders = folders_of(processes)
            assert folders and all(map(os.path.exists, folders))
        finally:
            front.kill()
        until(lambda: not any(map(is_alive, processes)) and not any(map(os.path.exists, folders)))


CLOSED = """
import os, signal
from tests.cluster.threads import CONFIG
from tests.patience import until
from workbench.cluster.cluster import Cluster

if __name__ == "__main__":
    cluster = Cluster(CONFIG, 2, address="local", cpus=1)
    number, victim = next(iter(cluster.replicas.items()))
    os.kill(victim.process_id, signal.SIGKILL)
    until(lambda: cluster.starting)
    cluster.close()
    assert number not in cluster.replicas and len(cluster.replicas) == 1
    print("goes on")
"""


@own_ray
def test_a_front_goes_on_that_closes_while_a_replica_starts() -> None:
    """Ray exits a process where a thread uses it while it shuts down."""
    ended = python("-c", CLOSED)
    assert (ended.returncode, own_lines(ended.stdout)) == (0, ["goes on"]), ended.stderr


def own_lines(output: str) -> list[str]:
    """Return the lines of an output that are not Ray's, which writes of a killed worker to the driver's."""
    return [line for line in output.splitlines() if "(raylet)" not in line]


def folders_of(processes: set[int]) -> set[str]:
    """Return the folders for temporary files that command lines name."""
    found: set[str] = set()
    for each in processes:
        with suppress(OSError), open(f"/proc/{each}/cmdline") as file:
            found |= set(re.findall(rf"{SOCKET_FOLDER}/ray-\w+", file.read()))
    return found


GIVEN = """
import os, signal, sys
from tests.cluster.threads import CONFIG
from workbench.cluster.cluster import Cluster

if __name__ == "__main__":
    with Cluster(CONFIG, 2, "least_loaded", address=sys.argv[1], cpus=1) as cluster:
        handles = [cluster.submit("def fib(n):", max_tokens=40, temperature=0, ignore_eos=True) for _ in range(4)]
        for event in handles[0]:
            if event.kind == "decoded" and event.index == 4:
                os.kill(cluster.replicas[event.replica].process_id, signal.SIGKILL)
        for handle in handles:
            handle.wait()
            print([event.output_text for event in handle.events if event.kind == "finished"])
        print(*(each.process_id for each in cluster.replicas.values()), cluster.accounts[""].moves > 0)
"""


@own_ray
def test_replicas_run_on_a_cluster_at_an_address(tmp_path: Path) -> None:
    """A cluster that others started serves replicas, loses one without loss, and goes on when the front has left."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=SOCKET_FOLDER))
    watch = FrontWatch(str(folder))  # ends it, and removes its folder
    try:
        address = start_ray(folder)
        *texts, last = own_lines(python("-c", GIVEN, address, env=OPEN_CLUSTER, check=True).stdout)
        assert texts == [repr([alone("def fib(n):").output_text])] * 4
        *replicas, has_moved = last.split()
        assert has_moved == "True"
        until(lambda: not any(map(is_alive, map(int, replicas))))
        python("-c", RAY, "status", "--address", address, env=OPEN_CLUSTER, check=True)
    finally:
        watch.close()


# Ray's command. It gives a node 30 seconds, which has no setting and is too little on a busy machine.
RAY = """
from workbench.ray_start import import_ray, slow_start
import_ray("a test")
from ray.scripts.scripts import main
with slow_start():
    main()
"""
# Whether Ray's commands and drivers ask for a token depends on what ran before them.
OPEN_CLUSTER = os.environ | {"RAY_AUTH_MODE": "disabled"}


def start_ray(folder: Path) -> str:
    """Start a cluster on this machine, as its administrator would, and return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["start", "--head", f"--port={port}", "--num-cpus=4", "--include-dashboard=false"]
    command += [f"--temp-dir={folder}", "--disable-usage-stats", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    names = OPEN_CLUSTER | {"RAY_TMPDIR": str(folder)}  # where it notes that there is a cluster
    python("-c", RAY, *command, env=names, check=True)
    return f"127.0.0.1:{port}"


def test_an_address_without_a_cluster_is_refused_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        for scheme in ("", "ray://"):
            with pytest.raises(WorkbenchError, match=f"no Ray cluster can be used at {scheme}127.0.0.1:{port}"):
                check_reachable(f"{scheme}127.0.0.1:{port}")
    for wrong in ("somewhere", "127.0.0.1:", ":6379", "127.0.0.1:x"):
        with pytest.raises(WorkbenchError, match="give HOST:PORT, ray://HOST:PORT or auto"):
            check_reachable(wrong)
    with pytest.raises(WorkbenchError, match="no Ray cluster can be used at 127.0.0.1:99999"):
        check_reachable("127.0.0.1:99999")
