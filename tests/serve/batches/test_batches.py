"""Files, batches and message batches with the vendors' clients, over a server."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import batch_create_params, file_create_params
from openai.types.chat import ChatCompletion

from tests.patience import until
from tests.serve.serving import Json
from tests.thorough import tries
from workbench.serve.batches import message_batch_routes, openai_batch_routes
from workbench.serve.batches.message_batch_body import read_requests
from workbench.serve.batches.openai_batch_routes import OpenAIBatchBody, read_items
from workbench.serve.batches.stored_files import FileStore
from workbench.serve.batches.upload import parts_of, read_form
from workbench.serve.bodies.fields import IgnoredFields
from workbench.serve.errors import ApiError
from workbench.serve.server import Server

CHAT = "/v1/chat/completions"


@pytest.fixture
def messages_client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as made:
        yield made


def line(name: str, url: str = CHAT, **body: Any) -> bytes:
    values = {"model": "demo-chat", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": values}).encode()


def finished(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT) -> Any:
    uploaded = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h")
    until(lambda: client.batches.retrieve(batch.id).status == "completed")
    return client.batches.retrieve(batch.id)


def results(client: openai.OpenAI, id: str | None) -> Json:
    assert id is not None
    lines = client.files.content(id).content.splitlines()
    return {found["custom_id"]: found["response"] for found in map(json.loads, lines)}


def test_a_file_of_chats_becomes_a_file_of_answers(client: openai.OpenAI) -> None:
    content = b"\n".join([line("a"), line("b", temperature=0), b"", b"not json", line("c", temperature=9), line("a")])
    batch = finished(client, content)
    assert batch.request_counts.to_dict() == {"total": 5, "completed": 2, "failed": 3}
    answers, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert {*answers} == {"a", "b"} and {*errors} == {"line 3", "c", "a"}
    for answer in answers.values():
        assert ChatCompletion.model_validate(answer["body"]).choices[0].message.content is not None
    assert all(found["status_code"] == 400 and found["body"]["error"]["message"] for found in errors.values())
    assert errors["c"]["body"]["error"]["param"] == "temperature"
    assert batch.usage.output_tokens == sum(each["body"]["usage"]["completion_tokens"] for each in answers.values())


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/embeddings", {"input": "hi"}), ("/v1/responses", {"input": "hi", "max_output_tokens": 3})],
)
def test_other_routes_in_batches(client: openai.OpenAI, url: str, body: Json) -> None:
    values = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "demo-chat", **body}}
    batch = finished(client, json.dumps(values).encode(), url)
    assert results(client, batch.output_file_id)["a"]["status_code"] == 200


def test_a_batch_is_cancelled(client: openai.OpenAI) -> None:
    content = b"\n".join(line(str(n), max_tokens=900, ignore_eos=True) for n in range(40))
    uploaded = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    until(lambda: client.batches.retrieve(batch.id).status == "cancelled")
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None and counts.total == 40 and counts.completed < 40
    assert batch.id in [each.id for each in client.batches.list(limit=1)]


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = bytes(range(256)) + b"\r\n--x\r\n\r\n"
    made = client.files.create(file=("odd name.jsonl", content), purpose="batch")
    assert client.files.retrieve(made.id) == made and made.bytes == len(content)
    assert client.files.content(made.id).content == content
    assert made.id in [each.id for each in client.files.list(purpose="batch")]
    assert client.files.delete(made.id).deleted
    for ask in (lambda: client.files.retrieve(made.id), lambda: client.files.content(made.id)):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"b"), purpose="vision")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(file=("a", b"b"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    with pytest.raises(openai.NotFoundError, match="input_file_id"):
        client.batches.create(input_file_id=made.id, endpoint=CHAT, completion_window="24h")


def test_a_store_is_bounded_finds_its_files_again_and_keeps_tenants_apart(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_files=2, max_tenant_bytes=10, max_bytes=17)
    first = store.add("t", "a", "batch", [b"123", b"45"])
    for content, tenant in ((b"123456", "t"), (b"12345678901", "u")):
        with pytest.raises(ApiError, match="delete files"):
            store.add(tenant, "b", "batch", [content])
    store.add("t", "b", "batch", [b"1"])
    with pytest.raises(ApiError, match="delete some"):
        store.add("t", "c", "batch", [b"1"])
    store.add("u", "a", "batch", [b"1234567890"])
    with pytest.raises(ApiError, match="for all"):
        store.add("v", "a", "batch", [b"12"])
    assert store.num_bytes == 16
    with pytest.raises(ApiError, match="no file"):
        store.get("u", first.id)
    again = FileStore(tmp_path, max_files=2, max_tenant_bytes=10)
    assert again.get("t", first.id) == first and again.path(first).read_bytes() == b"12345"
    again.remove(first)
    assert len(FileStore(tmp_path).list("t")) == 1


def test_files_of_a_process_that_was_killed_are_whole_or_gone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    whole, torn = store.add("t", "a", "batch", [b"whole"]), store.add("t", "b", "batch", [b"torn"])
    hidden = store.add("t", "", "message_results", [b"its batch is no longer known"])
    store.writer("t", "c", "batch").write(b"half of it")
    store.path(torn).write_bytes(b"to")
    (tmp_path / f"file-{'0' * 24}").write_bytes(b"renamed, and not described")
    (tmp_path / "other.json").write_text("not ours")
    again = FileStore(tmp_path)
    assert again.list("t") == [whole] and again.num_bytes == 5
    assert not again.path(hidden).exists() and not again.path(torn).exists()
    for path in tmp_path.iterdir():  # an hour later it is sure that no other process writes them
        os.utime(path, (0, 0))
    FileStore(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {whole.id, f"{whole.id}.json", "other.json"}


def test_a_file_is_not_seen_before_it_is_whole(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    writer = store.writer("t", "a", "batch")
    writer.write(b"half")
    assert not store.list("t") and not [*tmp_path.glob("file-*")] and store.num_bytes == 4
    writer.discard()
    writer.discard()
    assert not [*tmp_path.iterdir()] and store.num_bytes == 0


def test_files_expire() -> None:
    now = [1000.0]
    store = FileStore(clock=lambda: now[0])
    writer = store.writer("t", "a", "batch_output")
    writer.write(b"result")
    found = writer.finish(expires=1010)
    assert store.get("t", found.id).as_json()["expires_at"] == 1010
    now[0] = 1010.0
    assert not store.list("t") and store.num_bytes == 0 and not store.path(found).exists()
    with pytest.raises(ApiError, match="no file"):
        store.get("t", found.id)


@settings(max_examples=tries(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["write", "must", "finish", "discard", "remove"]), st.integers(0, 8))))
def test_the_budget_is_the_sum_of_what_is_there(steps: list[tuple[str, int]]) -> None:
    store = FileStore(max_tenant_bytes=12, max_bytes=20)
    writers, files = [store.writer(tenant, "", "batch_input") for tenant in "ttuuv"], []
    for act, number in steps:
        writer = writers[number % len(writers)]
        if act in ("write", "must"):
            with suppress(ApiError):
                writer.write(b"x" * number, must=act == "must")
        elif act == "remove":
            for each in files[:1]:
                store.remove(each)
        else:
            if act == "finish":
                files.append(writer.finish())
            writer.discard()
            writers[number % len(writers)] = store.writer(writer.file.tenant, "", "batch_input")
        assert store.num_bytes == sum(path.stat().st_size for path in store.folder.iterdir() if path.suffix != ".json")
        if not any(act == "must" for act, _ in steps):
            assert store.num_bytes <= 20


@settings(max_examples=tries(100), deadline=None)
@given(st.binary(max_size=40), st.binary(max_size=200))
def test_a_form_is_read_exactly(content: bytes, noise: bytes) -> None:
    head = b'--mark\r\nContent-Disposition: form-data; name="file"; filename="f; g=1"\r\n\r\n'
    if b"\r\n--mark" not in b"\r\n" + content:
        form = (
            head
            + content
            + b'\r\n--mark\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--mark--\r\n'
        )
        fields = read_form(form, 'multipart/form-data; boundary="mark"')
        found = {name: (each.filename, b"".join(parts_of(form, each))) for name, each in fields.items()}
        assert found == {"file": ("f; g=1", content), "purpose": ("", b"batch")}
        for cut in range(len(form) - 4):
            with pytest.raises(ApiError, match="form"):
                read_form(form[:cut], "multipart/form-data; boundary=mark")
    with pytest.raises(ApiError):
        read_form(noise, "multipart/form-data; boundary=mark")
    with pytest.raises(ApiError):
        read_form(noise, "application/json")


def test_a_form_is_bounded() -> None:
    kind = "multipart/form-data; boundary=mark"
    field = b'--mark\r\ncontent-disposition: form-data; name="%d"\r\n\r\n\r\n'
    assert len(read_form(b"".join(field % n for n in range(16)) + b"--mark--", kind)) == 16
    for form, why in (
        (b"".join(field % n for n in range(17)) + b"--mark--", "more than 16"),
        ((field % 1) * 2 + b"--mark--", "twice"),
        (b"--mark\r\n" + b"x" * 9000 + b"\r\n\r\n\r\n--mark--", "headers"),
    ):
        with pytest.raises(ApiError, match=why):
            read_form(form, kind)
    with pytest.raises(ApiError):
        read_form(b"", f"multipart/form-data; boundary={'x' * 71}")


def test_bounds_of_a_batch() -> None:
    for content in (b"", b"\n\n", b"{}\n" * 50_001):
        with pytest.raises(ApiError, match="lines"):
            deque(read_items(content.splitlines(), CHAT, set()))


def test_unknown_fields_of_a_batch_are_listed_and_null_says_nothing() -> None:
    ignored = IgnoredFields()
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {}, "metadata": None, "x": 1}
    content = [json.dumps(line).encode()]
    assert [each.error for each in read_items(content, CHAT, set(), ignored)] == [None]
    request = {"custom_id": "a", "params": {}, "x": 1, "y": None}
    batch = json.dumps({"requests": [request], "x": 1, "workspace_id": "w"}).encode()
    assert len([*read_requests(batch, "/p", ignored)]) == 1
    assert {*ignored} == {"line.x", "MessageRequest.x", "x", "workspace_id"}
    (item,) = read_items(content, CHAT, set(), IgnoredFields(is_strict=True))
    assert item.error is not None and "x: unknown field" in item.error.message


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=tries(100), deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=4),
    st.sampled_from([None, 0, 2]),
)
def test_messages_are_read_one_by_one_as_json_reads_them(params: list[Json], indent: int | None) -> None:
    requests = [{"custom_id": f"{n}", "params": each} for n, each in enumerate(params)]
    content = json.dumps({"workspace_id": None, "requests": requests}, indent=indent).encode()
    assert [each.body for each in read_requests(content, "/p")] == params
    for cut in range(0, len(content) - 1, 1 + len(content) // 40):
        with pytest.raises(ApiError):
            deque(read_requests(content[:cut], "/p"))


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", ""), (b"[]", ""), (b'{"requests": [NaN]}', ""), (b"[" * 100_000, ""),
        (b'{"requests": ' + b"[" * 100_000, ""),
        (b'{"requests": []} x', ""), (b'{"requests": [], "requests": []}', ""), (b'{"requests": 1}', "requests"),
        (b"{}", "requests"), (b'{"requests": []}', "requests"), (b'{"request": []}', "request"),
        (b'{"requests": [{"custom_id": "a", "params": {}}], "more": 1}', "more"), (b'\xff', ""),
        (b'{"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "b", "params": 1}]}', "requests.1.params"),
        (b'{"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}]}', "requests"),
    ],
)  # fmt: skip
def test_what_is_no_batch_of_messages_is_refused_by_its_place(content: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        deque(read_requests(content, "/p"))
    assert (caught.value.kind, caught.value.param) == ("invalid_request_error", param)


def test_the_most_messages_of_a_batch() -> None:
    requests = [{"custom_id": f"{n}", "params": {}} for n in range(10_000)]
    found = [each.custom_id for each in read_requests(json.dumps({"requests": requests}).encode(), "/p")]
    assert found == [f"{n}" for n in range(10_000)]
    requests.append({"custom_id": "more", "params": {}})
    with pytest.raises(ApiError, match="10,000"):
        deque(read_requests(json.dumps({"requests": requests}).encode(), "/p"))


def test_uploads_are_parsed_beside_the_event_loop(
    client: openai.OpenAI, messages_client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    for module, name in (
        (openai_batch_routes, "read_form"), (openai_batch_routes, "read_items"),
        (message_batch_routes, "read_requests"),
    ):  # fmt: skip
        function = getattr(module, name)

        def noted(*args: Any, function: Any = function) -> Any:
            threads.append(threading.current_thread().name)
            return function(*args)

        monkeypatch.setattr(module, name, noted)
    finished(client, line("a"))
    params: Any = {"model": "demo-chat", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    batch = messages_client.messages.batches.create(requests=[{"custom_id": "a", "params": params}])
    until(lambda: messages_client.messages.batches.retrieve(batch.id).processing_status == "ended")
    assert len(threads) == 3 and {each.rsplit("_", 1)[0] for each in threads} == {"batches"}


def test_message_batches(messages_client: anthropic.Anthropic) -> None:
    params: MessageCreateParamsNonStreaming = {
        "model": "demo-chat", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    wrong: Any = {**params, "max_tokens": -1}
    streamed: Any = {**params, "stream": True}
    batch = messages_client.messages.batches.create(
        requests=[
            {"custom_id": "a", "params": params}, {"custom_id": "b", "params": params},
            {"custom_id": "c", "params": wrong}, {"custom_id": "d", "params": streamed},
        ]
    )  # fmt: skip
    until(lambda: messages_client.messages.batches.retrieve(batch.id).processing_status == "ended")
    ended = messages_client.messages.batches.retrieve(batch.id)
    counts = ended.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (2, 2, 0)
    found: Json = {each.custom_id: each.result for each in messages_client.messages.batches.results(batch.id)}
    assert {name: result.type for name, result in found.items()} == {
        "a": "succeeded", "b": "succeeded", "c": "errored", "d": "errored"
    }  # fmt: skip
    assert found["a"].message.usage.output_tokens <= 4 and "max_tokens" in found["c"].error.error.message
    assert batch.id in [each.id for each in messages_client.messages.batches.list(limit=5)]
    messages_client.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        messages_client.messages.batches.retrieve(batch.id)


def test_a_message_batch_is_cancelled(messages_client: anthropic.Anthropic) -> None:
    params: MessageCreateParamsNonStreaming = {
        "model": "demo-chat", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    batches = messages_client.messages.batches
    batch = batches.create(requests=[{"custom_id": str(n), "params": params} for n in range(60)])
    assert batches.cancel(batch.id).processing_status in ("canceling", "ended")
    until(lambda: batches.retrieve(batch.id).processing_status == "ended")
    counts = batches.retrieve(batch.id).request_counts
    assert counts.canceled > 0 and counts.canceled + counts.succeeded == 60
    assert len([*batches.results(batch.id)]) == 60
    with pytest.raises(anthropic.BadRequestError, match="custom_id"):
        batches.create(requests=[{"custom_id": "a", "params": params}, {"custom_id": "a", "params": params}])


def test_every_field_of_a_batch_is_known() -> None:
    known = {*OpenAIBatchBody.model_fields} | {*OpenAIBatchBody.REFUSED}
    assert {*batch_create_params.BatchCreateParams.__annotations__} == known
    assert {*file_create_params.FileCreateParams.__annotations__} == {"file", "purpose", "expires_after"}
