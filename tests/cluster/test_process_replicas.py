"""A fleet on one machine without Ray: replicas in child processes, which die, are asked, and end with their front."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest

from tests.cluster.killed import check_cancelled_start, check_killed_replica
from tests.cluster.processes import descendants, is_alive
from tests.cluster.threads import CONFIG
from tests.helpers.processes import PIPE, start_python
from tests.patience import until
from workbench.cluster.cluster import Cluster
from workbench.cluster.pools_replica import ProcessLauncher
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError

REQUEST = attrgetter("request_id")
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


def unpicklable(runner: Any) -> Any:
    return threading.Lock()


@pytest.mark.smoke
def test_a_killed_replica_costs_no_token_and_has_a_successor(cluster: Cluster) -> None:
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    moves = check_killed_replica(cluster)
    assert all("its process has ended" in each.reason for each in moves)


def test_a_replica_can_be_asked_and_its_errors_are_the_askers(cluster: Cluster) -> None:
    for number, replica in cluster.replicas.items():
        for function, error in ((fail, "ValueError: planted"), (unpicklable, "cannot pickle '_thread.lock'")):
            with pytest.raises(WorkbenchError, match=error):
                cluster.call(function, number)
        assert replica.ready.process_ids == (replica.process_id,) != (os.getpid(),)  # type: ignore[attr-defined]
        assert cluster.call(vocabulary_size, number) == cluster.model.spec.vocab_size


def test_a_replica_that_cannot_start_says_why() -> None:
    with pytest.raises(WorkbenchError, match="engine 0 could not start: no model 'nowhere'"):
        ProcessLauncher(1, 1).start(1, EngineConfig.build("nowhere"))


def test_a_start_is_cancelled_while_its_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    check_cancelled_start(ProcessLauncher(1, 1), monkeypatch)


ALONE = """
import sys
from tests.cluster.threads import CONFIG
from workbench.cluster.cluster import Cluster

def vocabulary_size(runner):
    return runner.model.spec.vocab_size

if __name__ == "__main__":
    cluster = Cluster(CONFIG, 1, cpus=1)
    assert cluster.call(vocabulary_size) == cluster.model.spec.vocab_size
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
