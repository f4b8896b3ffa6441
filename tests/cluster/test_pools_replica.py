"""Pools behind the server: one replica of a cluster, whose engines die without a token lost."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import pytest

from tests.cluster.ends import end_of, until_begun
from tests.cluster.pool_threads import StartThreads, ThreadProcess
from tests.cluster.threads import ASKED, CONFIG, ThreadReplica, alone, demo
from tests.helpers.events import of
from tests.helpers.stand_in import stand_in
from tests.patience import limit, until
from workbench.cluster.apart.pool_processes import EngineProcess
from workbench.cluster.cluster import Cluster
from workbench.cluster.pools import PrefillDecodePools
from workbench.cluster.pools_replica import PoolsLauncher, PoolsReplica
from workbench.cluster.replica import fingerprint_of
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.serve.server import serve
from workbench.trace.events import HandedOver, Stepped


@pytest.mark.processes
def test_the_server_answers_from_pools() -> None:
    wanted, heard = alone("def fib(n):"), list[Any]()
    with Cluster(CONFIG, 1, launcher=PoolsLauncher(1, 1)) as cluster:
        cluster.listen(heard.append)
        with serve(cluster) as server:
            body = {"model": "demo", "prompt": "def fib(n):", "stream": True, "stream_options": {"include_usage": True}}
            body |= {"max_tokens": ASKED["max_tokens"], "temperature": 0, "ignore_eos": True}
            asked = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=limit(120)) as answer:
                lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=limit(60)) as answer:
                assert 'vllm:kv_cache_usage_perc{model_name="demo"} 0.0' in answer.read().decode()
        pieces = [json.loads(line) for line in lines]
        assert "".join(each["choices"][0]["text"] for each in pieces if each["choices"]) == wanted.output_text
        assert pieces[-1]["usage"]["completion_tokens"] == len(wanted.token_ids)
        [handover] = of(HandedOver, heard)
        assert (handover.source, handover.replica) == (1, 2)
        assert {each.replica for each in of(Stepped, heard)} == {1, 2}
        [pools] = cluster.replicas.values()
        handles = [cluster.submit("def fib(n):", **ASKED) for _ in range(3)]
        until_begun(handles, 3)
        pools.pools.kill(1)  # type: ignore[attr-defined] (of pools)
        for handle in handles:
            assert handle.wait(limit(120))
            end = end_of(handle.events)
            assert end.token_ids == wanted.token_ids and end.output_text == wanted.output_text
        assert list(cluster.replicas.values()) == [pools], "its engine was replaced, and not the replica"


def test_a_pool_without_an_engine_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="prefill: 1, decode: 0; give each an engine at least"):
        PoolsLauncher(1, 0)


def thread_pools() -> PoolsLauncher:
    return PoolsLauncher(1, 1, processes=StartThreads(lambda config: demo()))


def test_a_replica_has_the_fingerprint_of_its_weights_and_settings() -> None:
    """By which answers are cached, and clients know that they may differ."""
    launcher = thread_pools()
    other = CONFIG.model_copy(update={"schedule": CONFIG.schedule.model_copy(update={"max_num_seqs": 3})})
    first, second, third = (launcher.start(number, each).ready for number, each in enumerate((CONFIG, CONFIG, other)))
    launcher.close()
    assert first.fingerprint == second.fingerprint == fingerprint_of(Runner(CONFIG, demo())) != third.fingerprint
    assert first.cache_tokens == CONFIG.cache.page_size * 120


def test_no_call_of_the_front_waits_for_an_end(monkeypatch) -> None:
    """The end of a process may take long; the end of the launcher waits for it."""
    goes_on, kill = threading.Event(), ThreadProcess.kill
    monkeypatch.setattr(ThreadProcess, "kill", lambda self: (goes_on.wait(), kill(self)))
    launcher = thread_pools()
    replica = launcher.start(1, CONFIG)
    replica.stop()
    assert not goes_on.is_set() and replica.pools._thread.is_alive()
    replica.submit([])
    replica.cancel("r")
    goes_on.set()
    launcher.close()
    assert not replica.pools._thread.is_alive()


def test_pools_whose_coordinator_ends_are_a_lost_replica() -> None:
    """Their requests go on at their successor, and so do those that come before the loss is noticed."""
    wanted = alone("def fib(n):")
    with Cluster(CONFIG, 1, launcher=thread_pools()) as cluster:
        [first] = cluster.replicas.values()
        pools: PrefillDecodePools = first.pools  # type: ignore[attr-defined] (of pools)
        handle = cluster.submit("def fib(n):", **ASKED)
        until_begun([handle], 3)
        pools._put(lambda: 1 // 0)
        until(lambda: not pools._thread.is_alive())
        late = cluster.submit("def fib(n):", **ASKED)
        for each in (handle, late):
            assert each.wait(limit(120))
            end = end_of(each.events)
            assert end.token_ids == wanted.token_ids and not end.error
        assert list(cluster.replicas.values()) != [first]


def test_pools_without_an_engine_left_are_a_lost_replica() -> None:
    launcher = thread_pools()
    replica = launcher.start(1, CONFIG)
    for slot, why in zip(replica.pools.slots, ("", "all its processes have ended"), strict=True):
        slot.state = "gone"  # after three processes in a row that never served
        assert replica.lost_by == why
    launcher.close()


def test_a_process_may_be_forgotten_as_it_is_read() -> None:
    """By the coordinator, in its own thread."""
    replica, reads = PoolsReplica.__new__(PoolsReplica), iter((stand_in(EngineProcess, pid=7), None))
    slot = type("FadingSlot", (), {"process": property(lambda slot: next(reads))})()
    replica.pools = stand_in(PrefillDecodePools, slots=[slot])
    assert replica.process_id == 7


def test_pools_that_cannot_be_described_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolsReplica, "_describe", lambda replica: 1 // 0)
    launcher = thread_pools()
    start: Any = launcher._start_process
    with pytest.raises(ZeroDivisionError):
        launcher.start(1, CONFIG)
    assert start.num_started == 2 and not any(each._thread.is_alive() for each in start.living.values())


def break_steps(runner: Runner) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("a step went wrong")

    runner.step = fail  # type: ignore[method-assign]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_broke_an_engine_is_why_its_replica_is_lost() -> None:
    replica, lost = ThreadReplica(1, CONFIG), list[str]()
    replica.call(break_steps)
    replica.submit([Request("r", (5, 6, 7), SamplingParameters(max_tokens=4))])
    replica.listen(lambda report: None, lost.append)
    replica.close()
    assert lost == ["replica 1: ArithmeticError: a step went wrong"]


def test_a_step_that_does_not_end_is_seen() -> None:
    """By a server's health, before it counts as lost."""
    launcher = thread_pools()
    replica = launcher.start(1, CONFIG)
    start: Any = launcher._start_process
    for each in start.living.values():
        each.mortal.hang()
    until(lambda: replica.busy_seconds)
    start.living["decode 1"].mortal.go_on()
    until(lambda: not replica.pools.slots[1].silent)
    assert replica.pools.slots[0].silent and not replica.busy_seconds
    launcher.close()


def test_the_launcher_forgets_a_replica_that_was_lost_or_retired() -> None:
    """With its pools, which it would keep until the end of the server."""
    launcher = thread_pools()
    lost, retired, left = (launcher.start(number, CONFIG) for number in (1, 2, 3))
    lost.pools._put(lambda: 1 // 0)
    lost.listen(lambda report: None, lambda why: None)
    retired.stop()
    until(lambda: launcher._started == [left])
    assert lost.ready.pages == left.ready.pages and lost.ready.pages.free > 0, "which the front's guess remembers"
    launcher.close()
    assert launcher._started == []
