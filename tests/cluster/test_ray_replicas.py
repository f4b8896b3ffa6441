"""Replicas in processes: a real Ray on this machine, a SIGKILL in mid-answer, the server in front."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.cluster.test_cluster import ASKED, alone
from tests.cluster.threads import CONFIG
from tests.patience import limit, until
from workbench.cluster.cluster import Cluster
from workbench.serve.server import serve
from workbench.trace.events import Decoded, Finished, Moved

pytest.importorskip("ray", reason="pip install 'ray>=2.40'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(CONFIG, 2, "least_loaded", cpus=1)  # which tries three times to start Ray
    processes = [each.process_id for each in made.replicas.values()]  # type: ignore[attr-defined] (of a process)
    yield made
    processes += [each.process_id for each in made.replicas.values()]  # type: ignore[attr-defined] (of a process)
    made.close()
    until(lambda: not any(map(is_alive, processes)))


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return open(f"/proc/{process}/stat").read().split()[2] != "Z"


def test_a_killed_replica_costs_no_token(cluster: Cluster) -> None:
    heard: list[Any] = []
    leave = cluster.listen(heard.append)
    handles = [cluster.submit("def fib(n):", **ASKED) for _ in range(4)]
    until(lambda: all(sum(isinstance(each, Decoded) for each in handle.events) > 2 for handle in handles))
    number, victim = next(iter(cluster.replicas.items()))
    os.kill(victim.process_id, signal.SIGKILL)  # type: ignore[attr-defined] (of a process)
    assert all(handle.wait(limit(120)) for handle in handles)
    wanted = alone("def fib(n):")
    for handle in handles:
        (end,) = (each for each in handle.events if isinstance(each, Finished))
        tokens = [each for each in handle.events if isinstance(each, Decoded)]
        assert (end.token_ids, end.output_text) == (wanted.token_ids, wanted.output_text)
        assert [each.index for each in tokens] == list(range(len(wanted.token_ids)))
        assert "".join(each.text for each in tokens) + end.text == wanted.output_text
    moves = [each for each in heard if isinstance(each, Moved)]
    assert len(moves) == cluster.accounts[""].moves and all(each.source == number for each in moves)
    until(lambda: len(cluster.replicas) == 2)  # a new one in its place
    assert number not in cluster.replicas and cluster.pages.used == 0
    leave()


def test_the_server_answers_from_a_cluster(cluster: Cluster) -> None:
    with serve(cluster) as server:
        body = {"model": "demo", "prompt": "def fib(n):", "stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": ASKED["max_tokens"], "temperature": 0, "ignore_eos": True}
        asked = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=limit(120)) as answer:
            lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
        pieces = [json.loads(line) for line in lines]
        text = "".join(each["choices"][0]["text"] for each in pieces if each["choices"])
        wanted = alone("def fib(n):")
        assert text == wanted.output_text
        assert pieces[-1]["usage"]["completion_tokens"] == len(wanted.token_ids)
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=limit(60)) as answer:
            assert 'vllm:kv_cache_usage_perc{model_name="demo"} 0.0' in answer.read().decode()


def test_a_replica_can_be_asked(cluster: Cluster) -> None:
    for number in cluster.replicas:
        assert cluster.call(lambda runner: runner.model.spec.vocab_size, number) == cluster.model.spec.vocab_size


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


def descendants(process: int) -> set[int]:
    """Return the processes that descend from one."""
    parents: dict[int, int] = {}
    for each in os.listdir("/proc"):
        if each.isdigit():
            with suppress(OSError), open(f"/proc/{each}/stat") as file:
                parents[int(each)] = int(file.read().rsplit(")", 1)[1].split()[1])
    found, news = set[int](), {process}
    while news:
        news = {child for child, parent in parents.items() if parent in news} - found
        found |= news
    return found


def test_no_process_outlives_its_front() -> None:
    front = subprocess.Popen([sys.executable, "-c", ALONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    try:
        assert any(line == "serving\n" for line in front.stdout)
        processes = descendants(front.pid)
        assert len(processes) > 2  # Ray's own, and the replica
        front.kill()
        front.wait(limit(60))
        until(lambda: not any(map(is_alive, processes)))
    finally:
        front.kill()
        front.wait()
