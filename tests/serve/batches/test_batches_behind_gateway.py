"""Batches with a gateway in front: keys, tenants, limits, accounts, aliases; and clients that go before them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import limit, until
from tests.serve.serving import Json, held_steps, pages_used
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.gateway.gate import Gateway
from workbench.serve.batches import batch_work
from workbench.serve.batches.batch_store import BatchStore
from workbench.serve.batches.batch_work import retry_after
from workbench.serve.call import Call
from workbench.serve.errors import ApiError
from workbench.serve.server import Server, serve

MODEL = "demo-chat"
PATHS = {"chat": "/v1/chat/completions", "embeddings": "/v1/embeddings"}
CALLS = 2  # sequences of batches at once
LIMITS = {
    "each_tenant": {"requests_per_minute": 10_000},
    "tenants": {
        "narrow": {"requests_at_once": 1},
        "small": {"tokens_per_minute": 100},
        "slow": {"requests_per_minute": 1},
    },
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    folder = tmp_path_factory.mktemp("gateway")
    return Gateway(
        {
            "keys": str(folder / "keys.json"),
            "limits": LIMITS,
            "router": {"rules": [{"to": MODEL, "models": ["auto"]}]},
            "accounting": {"file": str(folder / "usage.sqlite")},
        }
    )


@pytest.fixture(scope="module")
def front(chat_runner: Runner, gateway: Gateway) -> Iterator[Server]:
    with serve(chat_runner, gate=gateway, batch_calls=CALLS, max_waiting=1) as running:
        yield running


@pytest.fixture(autouse=True)
def _all_is_settled(front: Server, chat_runner: Runner) -> Iterator[None]:
    """After each test: no call under way, every page free, every slot of the batches too."""
    yield
    until(lambda: not front.service.runs and not store_of(front).slots.taken)
    assert RunnerThread.attach(chat_runner).call(pages_used) == 0


class Tenant:
    """A client of both protocols with a key of its own."""

    def __init__(self, server: Server, gateway: Gateway, owner: str):
        assert gateway.keys is not None
        self.key, text = gateway.keys.create(owner)
        self._http = httpx.Client(
            base_url=server.url, headers={"authorization": f"Bearer {text}"}, timeout=limit(60)
        )  # fmt: skip

    def ask(self, method: str, path: str, **values: Any) -> httpx.Response:
        return self._http.request(method, path, **values)

    def chat(self) -> httpx.Response:
        return self.ask("POST", PATHS["chat"], json=chat())

    def upload(self, content: bytes) -> httpx.Response:
        return self.ask("POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)})

    def begin(self, bodies: list[Json], endpoint: str = PATHS["chat"]) -> str:
        lines = [
            {"custom_id": f"{n}", "method": "POST", "url": endpoint, "body": each} for n, each in enumerate(bodies)
        ]
        uploaded = self.upload(b"\n".join(json.dumps(each).encode() for each in lines)).json()
        body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
        return self.ask("POST", "/v1/batches", json=body).json()["id"]

    def batch(self, id: str) -> Json:
        return self.ask("GET", f"/v1/batches/{id}").json()

    def results(self, id: str) -> Json:
        """Wait for the end of a batch; return its lines by custom_id."""
        until(lambda: self.batch(id)["status"] in ("completed", "cancelled", "expired"))
        batch = self.batch(id)
        files = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name] is not None]
        lines = [line for file in files for line in self.ask("GET", f"/v1/files/{file}/content").content.splitlines()]
        found = [json.loads(line) for line in lines]
        assert len({each["custom_id"] for each in found}) == len(found)
        expired = {"code": "batch_expired", "message": "the batch expired before this request was run"}
        assert all(each["error"] == (expired if each["response"] is None else None) for each in found)
        return {each["custom_id"]: each["response"] for each in found}

    def begin_messages(self, params: list[Json]) -> str:
        body = {"requests": [{"custom_id": f"{n}", "params": each} for n, each in enumerate(params)]}
        return self.ask("POST", "/v1/messages/batches", json=body).json()["id"]

    def message_results(self, id: str) -> Json:
        path = f"/v1/messages/batches/{id}"
        until(lambda: self.ask("GET", path).json()["processing_status"] == "ended")
        lines = self.ask("GET", f"{path}/results").content.splitlines()
        return {each["custom_id"]: each["result"] for each in map(json.loads, lines)}


@pytest.fixture
def tenant(front: Server, gateway: Gateway) -> Callable[[str], Tenant]:
    return lambda owner: Tenant(front, gateway, owner)


def store_of(server: Server) -> BatchStore:
    return server.app.state.batches


def chat(max_tokens: int = 4, **values: Any) -> Json:
    return {"model": MODEL, "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hi"}], **values}


def rows(gateway: Gateway, owner: str) -> list[Any]:
    gateway.accounts.flush()
    return gateway.accounts.sums(("ended",), where={"tenant": owner})


@contextmanager
def in_background(ask: Callable[[], httpx.Response]) -> Iterator[list[httpx.Response]]:
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    yield found
    thread.join()


def test_tenants_see_only_their_own(tenant: Callable[[str], Tenant]) -> None:
    alice, bob = tenant("alice"), tenant("bob")
    batch = alice.begin([chat()])
    assert {*alice.results(batch)} == {"0"}
    messages = alice.begin_messages([chat()])
    alice.message_results(messages)
    files = [alice.batch(batch)[name] for name in ("input_file_id", "output_file_id")]
    ours = ["GET /v1/batches/" + batch, f"POST /v1/batches/{batch}/cancel"]
    ours += [f"{verb} /v1/files/{file}" for file in files for verb in ("GET", "DELETE")]
    ours += [f"GET /v1/files/{file}/content" for file in files]
    path = f"/v1/messages/batches/{messages}"
    ours += [f"GET {path}", f"GET {path}/results", f"POST {path}/cancel", f"DELETE {path}"]
    for each in ours:
        assert bob.ask(*each.split()).status_code == 404, each
    for path in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
        assert bob.ask("GET", path).json()["data"] == [] and alice.ask("GET", path).json()["data"]
    stolen = {"input_file_id": files[0], "endpoint": PATHS["chat"], "completion_window": "24h"}
    assert bob.ask("POST", "/v1/batches", json=stolen).status_code == 404
    assert alice.batch(messages)["error"] and alice.ask("GET", f"/v1/messages/batches/{batch}").status_code == 404


def test_accounts_have_every_line_once(tenant: Callable[[str], Tenant], gateway: Gateway) -> None:
    owner = tenant("counted")
    found = owner.results(owner.begin([chat(n % 5 + 1) for n in range(12)] + [chat(temperature=9)]))
    messages = owner.message_results(owner.begin_messages([chat()] * 3))
    usages = [each["body"]["usage"] for each in found.values() if each["status_code"] == 200]
    assert len(usages) == 12 and [each["type"] for each in messages.values()] == ["succeeded"] * 3
    (row,) = rows(gateway, "counted")
    output = sum(each["completion_tokens"] for each in usages)
    output += sum(each["message"]["usage"]["output_tokens"] for each in messages.values())
    assert (row.calls, row.usage.output) == (15, output)


def test_limits_make_lines_wait(
    tenant: Callable[[str], Tenant], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, admit = [], gateway.admit

    async def counted(call: Call) -> Any:
        try:
            return await admit(call)
        except ApiError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(gateway, "admit", counted)
    owner = tenant("narrow")  # one request at once, and batches run two
    found = owner.results(owner.begin([chat(48, ignore_eos=True)] * 3))
    assert [each["status_code"] for each in found.values()] == [200] * 3
    assert {each.kind for each in refused} == {"rate_limit_error"}
    (row,) = rows(gateway, "narrow")
    assert row.calls == 3


def test_a_line_that_no_later_moment_admits_is_an_error_at_once(
    tenant: Callable[[str], Tenant], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tenant("small")  # 100 tokens a minute
    found = small.results(small.begin([chat(200), chat(2)]))
    assert [found[name]["status_code"] for name in "01"] == [429, 200]
    assert "larger than the whole limit" in found["0"]["body"]["error"]["message"]
    monkeypatch.setattr(batch_work, "SECONDS_OF_LIFE", 20.0)
    slow = tenant("slow")  # one request a minute: the second could begin when the batch has expired
    assert sorted(each["status_code"] for each in slow.results(slow.begin([chat()] * 2)).values()) == [200, 429]


@pytest.mark.parametrize(
    ("kind", "failures", "attempts", "status"),
    [("unavailable_error", 2, 3, 200), ("unavailable_error", 99, 4, 503), ("invalid_request_error", 99, 1, 400)],
)
def test_what_fails_in_the_engine_is_tried_three_times_more(
    front: Server, tenant: Callable[[str], Tenant], monkeypatch: pytest.MonkeyPatch,
    kind: str, failures: int, attempts: int, status: int,
) -> None:  # fmt: skip
    complete, tried = front.service.complete, []

    async def failing(run: Any) -> Any:
        tried.append(run)
        pieces = await complete(run)
        if len(tried) <= failures:
            raise ApiError(kind, "the engine fell over")
        return pieces

    monkeypatch.setattr(front.service, "complete", failing)
    monkeypatch.setattr(batch_work, "RETRY_SECONDS", 0.01)
    owner = tenant("unlucky")
    assert owner.results(owner.begin([chat()]))["0"]["status_code"] == status
    assert len(tried) == attempts


def test_seconds_of_a_refusal() -> None:
    assert retry_after(ApiError("rate_limit_error", "a", headers={"retry-after": "7"})) == 7
    assert retry_after(ApiError("rate_limit_error", "a", headers={"retry-after": "0"})) == 0.05
    assert retry_after(ApiError("rate_limit_error", "a")) is None


def test_a_key_that_is_revoked_ends_its_batches(
    front: Server, chat_runner: Runner, tenant: Callable[[str], Tenant], gateway: Gateway
) -> None:
    assert gateway.keys is not None
    first, second = tenant("revoked"), tenant("revoked")  # another key of the owner reads the results
    with held_steps(chat_runner):
        batch = first.begin([chat()] * 6)
        until(lambda: len(front.service.runs) == CALLS)
        gateway.keys.revoke(first.key.id)
    found = second.results(batch)
    assert sorted(each["status_code"] for each in found.values()) == [200] * CALLS + [401] * (6 - CALLS)
    (row,) = rows(gateway, "revoked")
    assert row.calls == CALLS


@pytest.mark.parametrize("kind", ["chat", "embeddings", "messages"])
def test_an_alias_is_a_model(tenant: Callable[[str], Tenant], kind: str) -> None:
    owner = tenant("aliased")
    if kind == "messages":
        found = owner.message_results(owner.begin_messages([chat(model="auto")]))["0"]
        assert found["type"] == "succeeded" and found["message"]["model"] == MODEL
    else:
        body = chat(model="auto") if kind == "chat" else {"model": "auto", "input": "hi", "dimensions": 8}
        found = owner.results(owner.begin([body], PATHS[kind]))["0"]
        assert found["status_code"] == 200 and found["body"]["model"] == MODEL


def test_cancel_settles_all(
    front: Server, chat_runner: Runner, tenant: Callable[[str], Tenant], gateway: Gateway
) -> None:
    owner = tenant("narrow")
    before = sum(each.calls for each in rows(gateway, "narrow"))
    with held_steps(chat_runner):
        batch, messages = owner.begin([chat(400)] * 9), owner.begin_messages([chat(400)] * 9)
        until(lambda: front.service.runs)
        assert owner.ask("POST", f"/v1/batches/{batch}/cancel").json()["status"] == "cancelling"
        owner.ask("POST", f"/v1/messages/batches/{messages}/cancel")
    assert owner.results(batch) == {}
    assert [each["type"] for each in owner.message_results(messages).values()] == ["canceled"] * 9
    assert owner.batch(batch)["request_counts"] == {"total": 9, "completed": 0, "failed": 0}
    found = rows(gateway, "narrow")
    assert sum(each.calls for each in found) - before <= CALLS
    answer = owner.ask("POST", PATHS["chat"], json=chat())  # the one request at once is free again
    assert answer.status_code == 200


def test_clients_go_before_batches_in_the_default_order(
    front: Server, chat_runner: Runner, tenant: Callable[[str], Tenant]
) -> None:
    owner, slots = tenant("mixed"), store_of(front).slots
    assert chat_runner.config.schedule.policy.kind == "interleaved"
    with (
        held_steps(chat_runner) as steps,
        in_background(owner.chat) as found,
    ):
        until(lambda: front.service.num_waiting == 1)
        batch = owner.begin([chat()] * 4)
        until(slots.head.locked)
        for _ in range(5):
            assert owner.batch(batch)["request_counts"]["completed"] == 0
        assert slots.head.locked() and not slots.taken
        assert not any(run.call.background for run in front.service.runs)
        steps.release()
        assert {each["status_code"] for each in owner.results(batch).values()} == {200}
    assert found[0].status_code == 200


@pytest.mark.parametrize("kind", ["chat", "embeddings"])
def test_a_batch_expires_though_clients_still_wait(
    chat_runner: Runner, tenant: Callable[[str], Tenant], front: Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(batch_work, "SECONDS_OF_LIFE", 0.5)
    owner, body = tenant("mixed"), chat() if kind == "chat" else {"model": MODEL, "input": "hi"}
    with held_steps(chat_runner) as steps, in_background(owner.chat) as found:
        until(lambda: front.service.num_waiting == 1)
        batch = owner.begin([body] * 3, PATHS[kind])
        until(lambda: owner.batch(batch)["status"] == "expired")
        assert front.service.num_waiting == 1 and owner.batch(batch)["request_counts"]["completed"] == 0
        steps.release()
    assert found[0].status_code == 200 and owner.results(batch) == dict.fromkeys("012")


def test_lines_of_batches_do_not_count_as_waiting_and_leave_slots(
    front: Server, chat_runner: Runner, tenant: Callable[[str], Tenant], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, service = tenant("mixed"), front.service
    sequences, begin = [], service.begin

    async def counted(call: Call) -> Any:
        run = await begin(call)
        sequences.append(sum(each.call.num_choices for each in service.runs if each.call.background))
        return run

    monkeypatch.setattr(service, "begin", counted)
    with held_steps(chat_runner) as steps:  # the server lets one client wait
        batch = owner.begin([chat()] * 4 + [chat(n=2)] * 3 + [chat(n=3)] + [chat()] * 2)
        until(lambda: len(service.runs) == CALLS)
        with in_background(owner.chat) as found:
            until(lambda: service.num_waiting == 1)
            steps.release()
        assert found[0].status_code == 200
    assert {each["status_code"] for each in owner.results(batch).values()} == {200}
    assert max(sequences) == 3 and sorted(sequences)[-2] == CALLS  # a line of more than all slots runs alone


def test_bytes_of_a_tenant_are_bounded_and_results_expire(
    chat_runner: Runner, gateway: Gateway, tmp_path: Path
) -> None:
    options: Json = {
        "max_tenant_files_bytes": 4500, "max_files_bytes": 6000, "max_upload_bytes": 3500, "max_body_bytes": 1000,
        "files_folder": str(tmp_path),
    }  # fmt: skip
    with serve(chat_runner, **options) as server:
        owner, store = Tenant(server, gateway, "any"), store_of(server)
        for refused in (owner.upload(b"x" * 3501), owner.ask("POST", "/v1/messages/batches", content=b" " * 3501)):
            assert refused.status_code == 413, refused.text
        assert owner.upload(b"x" * 1500).status_code == 200
        refused = owner.upload(b"x" * 3100)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "storage_full"
        assert store.files.num_bytes == 1500
        long = chat(messages=[{"role": "user", "content": "x" * 1100}])
        found = owner.message_results(owner.begin_messages([long, *[chat()] * 6]))
        kinds = [each["type"] for each in found.values()]
        assert len(found) == 7 and kinds.count("succeeded") >= 1
        assert found["0"]["error"]["error"]["type"] == "request_too_large"
        full = [each["error"]["error"]["message"] for name, each in found.items() if name != "0" and "error" in each]
        assert full and all("delete files or batches" in each for each in full)
        (mine,) = owner.ask("GET", "/v1/files").json()["data"]
        owner.ask("DELETE", f"/v1/files/{mine['id']}")
        assert owner.ask("GET", "/v1/messages/batches").json()["data"]
        store.seconds = 0.0  # in place of a week
        assert not owner.ask("GET", "/v1/messages/batches").json()["data"]
        assert store.files.num_bytes == 0 and not [*tmp_path.iterdir()]
        batch = owner.begin([chat()])
        until(lambda: owner.ask("GET", f"/v1/batches/{batch}").status_code == 404)
        (left,) = owner.ask("GET", "/v1/files").json()["data"]
        assert left["purpose"] == "batch"


def test_a_server_that_stops_ends_its_batches_and_keeps_the_results(
    chat_runner: Runner, gateway: Gateway, tmp_path: Path
) -> None:
    with serve(chat_runner, batch_calls=CALLS, files_folder=str(tmp_path)) as server:
        owner = Tenant(server, gateway, "any")
        batch = owner.begin([chat(2)] * 3 + [chat(400, ignore_eos=True)] * 17)
        until(lambda: owner.batch(batch)["request_counts"]["completed"] >= 3)
    with serve(chat_runner, files_folder=str(tmp_path)) as server:
        owner = Tenant(server, gateway, "any")
        assert owner.ask("GET", f"/v1/batches/{batch}").status_code == 404
        files = {each["purpose"]: each["id"] for each in owner.ask("GET", "/v1/files").json()["data"]}
        assert {*files} == {"batch", "batch_output"}
        kept = owner.ask("GET", f"/v1/files/{files['batch_output']}/content").content.splitlines()
        assert 3 <= len(kept) < 20
