"""A fleet on one machine without Ray: replicas in child processes, which die, are asked, and end with their front."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.killed import check_killed_replica
from tests.cluster.processes import descendants, is_alive
from tests.cluster.threads import CONFIG
from tests.helpers.processes import PIPE, start_python
from tests.patience import until
from workbench.cluster.cluster import Cluster
from workbench.cluster.process_replicas import ProcessLauncher
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(CONFIG, 2, "least_loaded", cpus=1)
    yield made
    processes = [each.process_id for each in made.replicas.values()]  # type: ignore[attr-defined] (of a process)
    made.close()
    assert len(processes) == 2 and not any(map(is_alive, processes))


def vocabulary_size(runner: Any) -> int:
    return runner.model.spec.vocab_size


def fail(runner: Any) -> None:
    raise ValueError("planted")


@pytest.mark.smoke
def test_a_killed_replica_costs_no_token_and_has_a_successor(cluster: Cluster) -> None:
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    moves = check_killed_replica(cluster)
    assert all("its process has ended" in each.reason for each in moves)


def test_a_replica_can_be_asked_and_its_errors_are_the_askers(cluster: Cluster) -> None:
    for number in cluster.replicas:
        assert cluster.call(vocabulary_size, number) == cluster.model.spec.vocab_size
        with pytest.raises(WorkbenchError, match="ValueError: planted"):
            cluster.call(fail, number)


def test_a_replica_that_cannot_start_says_why() -> None:
    with pytest.raises(WorkbenchError, match="could not start: no model 'nowhere'"):
        ProcessLauncher(1, 1).start(1, EngineConfig.build("nowhere"))


ALONE = """
import sys
from tests.cluster.threads import CONFIG
from workbench.cluster.cluster import Cluster

if __name__ == "__main__":
    cluster = Cluster(CONFIG, 1, cpus=1)
    next(cluster.stream("def fib(n):", max_tokens=200, ignore_eos=True))
    print("serving", flush=True)
    sys.stdin.read()
"""


def test_nothing_outlives_its_front() -> None:
    with start_python("-c", ALONE, stdin=PIPE, stdout=PIPE) as front:
        try:
            assert any(line == "serving\n" for line in front.stdout)
            processes = descendants(front.pid)
            assert processes
        finally:
            front.kill()
        until(lambda: not any(map(is_alive, processes)))
