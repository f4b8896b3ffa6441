"""A cluster, with its front's thread, over replicas in threads of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.ends import end_of, until_begun
from tests.cluster.threads import ASKED, CONFIG, Threads, alone, demo
from tests.helpers.events import of
from tests.patience import limit, until
from workbench.cluster.cluster import Cluster
from workbench.cluster.front import FleetLimits
from workbench.cluster.launcher import pause_before_start
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.prompt.conversation import Conversation
from workbench.request import Request, SamplingParameters
from workbench.serve.server import serve
from workbench.trace.events import Decoded, Finished, Moved


@pytest.fixture
def launcher() -> Threads:
    return Threads()


@pytest.fixture
def cluster(launcher: Threads) -> Iterator[Cluster]:
    with Cluster(CONFIG, 2, launcher=launcher) as made:
        yield made


def test_a_cluster_streams_as_a_runner(cluster: Cluster) -> None:
    events = list(cluster.stream(["def fib(n):", "import"], **ASKED))
    ends = {event.request_id: event for event in of(Finished, events)}
    assert [each.token_ids for each in ends.values()] != [] and len(ends) == 2
    assert {end.token_ids for end in ends.values()} == {alone(text).token_ids for text in ("def fib(n):", "import")}
    with pytest.raises(WorkbenchError, match="temperature"):
        cluster.stream("x", temperature=-1)
    assert cluster.assemble(Conversation(turns=["hello"])).ids == Runner(CONFIG, demo()).assemble(
        Conversation(turns=["hello"])
    ).ids  # fmt: skip


@pytest.mark.parametrize("has_begun", [True, False])
def test_closing_a_stream_cancels_and_frees_its_pages(cluster: Cluster, has_begun: bool) -> None:
    stream = cluster.stream("def fib(n):", **{**ASKED, "max_tokens": 400})
    while has_begun and not isinstance(next(stream), Decoded):
        pass
    stream.close()  # type: ignore[attr-defined] (of a process)
    until(lambda: cluster.accounts[""].ended["cancelled"] == 1)
    assert cluster.pages.used == 0 and cluster.num_requests() == (0, 0)


def test_scaling_under_load_loses_nothing(cluster: Cluster, launcher: Threads) -> None:
    handles = [cluster.submit("def fib(n):", **{**ASKED, "seed": number, "temperature": 1}) for number in range(6)]
    cluster.scale(3)
    assert len(cluster.replicas) == 3
    cluster.scale(1)
    assert all(handle.wait(limit(60)) for handle in handles)
    until(lambda: len(cluster.replicas) == 1)
    assert {each.number: each.is_stopped for each in launcher.started} == {1: False, 2: True, 3: True}
    assert cluster.accounts[""].ended == {"length": 6}
    with pytest.raises(WorkbenchError, match="needs at least 1"):
        cluster.scale(0)


def test_a_share_of_the_requests_goes_to_another_config(cluster: Cluster) -> None:
    """The tenants keep to their variant: test_variants.py."""
    changed = CONFIG.model_copy(update={"schedule": CONFIG.schedule.model_copy(update={"max_num_seqs": 3})})
    cluster.deploy(changed, share=0.5, name="three at once")
    few = SamplingParameters(max_tokens=4)
    requests = [Request(f"r{number}", (5, 6, 7), few, tenant=f"tenant {number}") for number in range(24)]
    ends = of(Finished, cluster.stream(requests))
    (second,) = (number for number, view in cluster.front.replicas.items() if view.variant)
    counts = {name: sum(account.ended.values()) for name, account in cluster.accounts.items()}
    assert sum(counts.values()) == 24 and min(counts.values()) > 0
    assert counts["three at once"] == sum(end.replica == second for end in ends)
    table = cluster.compare()
    assert table.headings == ("", "first", "three at once")
    assert [*table.rows[0]] == ["samples", counts[""], counts["three at once"]]
    cluster.deploy(changed, share=1, name="all")
    until(lambda: len(cluster.replicas) == 1)
    assert list(cluster.front.variants.shares) == ["all"]
    end = end_of(cluster.stream([requests[0]]))
    assert end.replica in cluster.replicas and end.reason in ("stop", "length")


def test_without_any_replica_requests_end_with_the_reason(cluster: Cluster, launcher: Threads) -> None:
    handle = cluster.submit("def fib(n):", **{**ASKED, "max_tokens": 400})
    launcher.broken = "no memory is left"
    for each in list(launcher.started):
        each.die()
    assert handle.wait(limit(60))
    assert "no replica can be started: no memory is left" in handle.error
    assert handle.events[-1].kind == "finished"


def test_what_is_wrong_is_said_before_anything_starts() -> None:
    launcher = Threads()
    with pytest.raises(WorkbenchError, match="replicas: 0"):
        Cluster(CONFIG, 0, launcher=launcher)
    with pytest.raises(WorkbenchError, match="known: round_robin"):
        Cluster(CONFIG, 2, "by_luck", launcher=launcher)
    launcher.broken = "no model"
    with pytest.raises(WorkbenchError, match="no model"):
        Cluster(CONFIG, 2, launcher=launcher)
    assert not launcher.started


def test_a_full_fleet_refuses_over_http_and_goes_on(launcher: Threads) -> None:
    """Beyond `waiting` a call is answered with 503 and `retry-after`; those that were taken end as they should."""
    limits = FleetLimits(page_size=16, replica_samples=1, waiting=1)
    with Cluster(CONFIG, 1, launcher=launcher, limits=limits) as cluster, serve(cluster) as server:
        taken = [cluster.submit("def fib(n):", **{**ASKED, "max_tokens": 120}) for _ in range(2)]
        until(lambda: cluster.num_requests() == (1, 1))
        body = {"model": "demo", "prompt": "x", "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=limit(60))
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "the fleet is full, with 1 waiting" in refused.json()["error"]["message"]
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/messages", json=body, timeout=limit(60))
        assert refused.status_code in (400, 529)  # a model without control tokens cannot chat
        assert all(handle.wait(limit(60)) for handle in taken)
        metrics = httpx.get(f"{server.url}/metrics", timeout=limit(60)).text
        assert 'workbench:replicas{model_name="demo",variant=""} 1.0' in metrics
        assert 'workbench:fleet_samples_total{model_name="demo",variant=""} 2.0' in metrics


def test_a_closed_cluster_ends_what_it_has_and_takes_no_more(launcher: Threads) -> None:
    cluster = Cluster(CONFIG, 1, launcher=launcher)
    handle = cluster.submit("def fib(n):", **{**ASKED, "max_tokens": 400})
    cluster.close()
    cluster.close()
    assert handle.wait(limit(60)) and handle.error == "the cluster was closed"
    assert all(each.is_stopped for each in launcher.started)
    for call in (
        lambda: cluster.stream("x"), lambda: cluster.scale(2), lambda: cluster.deploy(CONFIG, 0.5),
        lambda: cluster.call(lambda runner: None),
    ):  # fmt: skip
        with pytest.raises(WorkbenchError, match="the cluster was closed"):
            call()
    handle.stop()
    cluster.stop()


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_start_under_way_has_ended_before_the_launcher_is_closed(launcher: Threads, is_cancelled: bool) -> None:
    """Ray exits the process where a thread uses it while it shuts down. A replica that starts all the same is ended."""
    cluster = Cluster(CONFIG, 2, launcher=launcher)
    launcher.held = threading.Event()
    launcher.entered.clear()
    if not is_cancelled:
        launcher.cancel_starts = launcher.held.set  # as one that cannot cancel: the start ends by itself
    launcher.started[0].die()
    launcher.entered.wait()
    assert list(cluster.starting) == [3]
    cluster.close()
    assert launcher.under_way_at_close == launcher.under_way == 0
    assert len(launcher.started) == (2 if is_cancelled else 3)
    assert all(each.is_stopped for each in launcher.started[1:])
    assert not [each.name for each in threading.enumerate() if each.name.endswith("of replica 3")]


def test_a_listener_may_close_the_cluster(launcher: Threads) -> None:
    """In the front's thread, which the start under way asks to be taken in."""
    cluster = Cluster(CONFIG, 2, "least_loaded", launcher=launcher)
    launcher.held, closed = threading.Event(), threading.Event()
    launcher.entered.clear()

    def close(event: Any) -> None:
        if isinstance(event, Moved):
            launcher.entered.wait()
            cluster.close()
            closed.set()

    handles = [cluster.submit("def fib(n):", **ASKED) for _ in range(2)]
    until_begun(handles)
    cluster.listen(close)
    launcher.started[0].die()
    closed.wait()
    assert launcher.under_way_at_close == 0


def test_a_batch_runs_on_a_cluster(cluster: Cluster) -> None:
    assert cluster.cache_tokens == CONFIG.cache.page_size * 120
    path = "/v1/completions"
    body = {"model": "demo", "prompt": "def fib(n):", **ASKED}
    content = json.dumps({"custom_id": "a", "method": "POST", "url": path, "body": body})
    with serve(cluster) as server, httpx.Client(base_url=f"{server.url}/v1", timeout=limit(60)) as client:
        file = client.post("/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)}).json()["id"]
        asked = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
        batch = client.post("/batches", json=asked).json()["id"]
        until(lambda: client.get(f"/batches/{batch}").json()["status"] == "completed")
        output = client.get(f"/batches/{batch}").json()["output_file_id"]
        (line,) = client.get(f"/files/{output}/content").text.splitlines()
    assert json.loads(line)["response"]["body"]["choices"][0]["text"] == alone("def fib(n):").output_text


@pytest.mark.parametrize(("others_serve", "later"), [(True, [5, 10, 20, 40, 60, 60]), (False, [None] * 6)])
def test_successors_follow_at_once_and_then_after_pauses_while_others_serve(others_serve: bool, later: list) -> None:
    assert [pause_before_start(failed, others_serve) for failed in range(9)] == [0, 0, 0, *later]


def test_a_start_that_fails_is_reported_and_tried_again(launcher: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.cluster.launcher.FIRST_PAUSE", 0.05)
    lines: list[str] = []
    with Cluster(CONFIG, 2, launcher=launcher, report=lines.append) as cluster:
        launcher.broken = "no memory is left"
        launcher.started[0].die()
        until(lambda: sum("no memory is left" in line for line in lines) > 3)  # three at once, and later others
        assert cluster.num_replicas() == 1
        launcher.broken = ""
        until(lambda: cluster.num_replicas() == 2)
        assert cluster._deployments.variants[""].failed_starts == 0, "the next one is replaced at once"
