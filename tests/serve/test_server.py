"""A server's life: it starts beside cells, refuses what it cannot do, drains, and outlives its engine's failures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import deque
from typing import Any

import httpx
import openai
import pytest

import workbench
from tests.helpers.processes import PIPE, start_python
from tests.patience import limit, until
from tests.serve.serving import CALCULATE, RecordingGate, connect, events_of, held_steps, post, read_until
from workbench.cli.serve import read_serve_config
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.serve.call import ADMIN, Caller
from workbench.serve.server import Server, serve
from workbench.trace.events import Decoded

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "demo-chat",
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "max_tokens": 8,
}


def get(server: Server, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
    request = urllib.request.Request(server.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            raw, status, found = answer.read(), answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        raw, status, found = error.read(), error.code, dict(error.headers)
    return status, json.loads(raw) if "json" in found.get("content-type", "") else raw.decode(), found


def ask(server: Server, **options: Any) -> tuple[int, Any]:
    with connect(server) as connection:
        connection.sendall(post(CHAT, {**ASK, **options}, connection="close"))
        raw = read_until(connection, lambda raw: False)
    head, _, content = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


@pytest.mark.processes
def test_the_package_can_be_called_before_and_after_its_modules_are_imported() -> None:
    for first in ("", "import workbench.serve.app\n"):
        program = f"{first}import workbench, inspect\nprint(callable(workbench.serve), workbench.serve.__name__, " \
                  "list(inspect.signature(workbench.serve).parameters)[:2])"  # fmt: skip
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert said.split(" ", 1)[1].strip() == "workbench.serve ['runner', 'port']" and said.startswith("True")


def test_the_runner_stays_usable_in_cells(server: Server, client: openai.OpenAI, chat_runner: Runner) -> None:
    texts: list[str] = []
    stream = client.chat.completions.create(**ASK, stream=True, temperature=0)
    for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "" if chunk.choices else "")
        if len(texts) == 2:
            events = chat_runner.stream("def f", max_tokens=4, temperature=0)
            assert sum(isinstance(each, Decoded) for each in events) == 4
    assert "".join(texts)


def test_models_health_metrics_and_traces(server: Server, client: openai.OpenAI) -> None:
    assert get(server, "/health")[:2] == (200, {"status": "ok"})
    (model,) = client.models.list().data
    assert model.id == "demo-chat" == client.models.retrieve("demo-chat").id
    answer = client.chat.completions.create(**ASK, n=2, extra_body={"user": "someone"})
    status, trace, _ = get(server, f"/v1/traces/{answer.id}")
    assert status == 200 and trace["outcome"]["ended"] == "finished"
    assert trace["outcome"]["used"]["completion_tokens"] == answer.usage.completion_tokens  # type: ignore[union-attr] (it has)
    assert sum(len(each["tokens"]) for each in trace["choices"]) == answer.usage.completion_tokens  # type: ignore[union-attr] (it has)
    assert "user" in trace["ignored"] and [each["name"] for each in trace["prompts"][0]["segments"]]
    assert {"queue", "prefill", "decode"} <= {each["name"] for each in trace["spans"]}
    assert any(each["action"] == "admitted" for each in trace["decisions"])
    assert all(each["predicted"]["flops"] > 0 < each["measured"]["seconds"] for each in trace["steps"])
    assert not trace["text_withheld"] and any(each["text"] for each in trace["choices"][0]["tokens"])
    times = [token["time"] for token in trace["choices"][0]["tokens"]]
    assert times == sorted(times) and times[0] > 0
    status, page, _ = get(server, "/metrics")
    assert status == 200 and 'vllm:time_to_first_token_seconds_count{model_name="demo-chat"}' in page
    assert 'vllm:num_requests_running{model_name="demo-chat"} 0.0' in page
    assert get(server, "/v1/traces/none")[0] == 404


COUNTED = {"model": "demo-chat", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("path", ["/v1/models?order=desc", "/v1/files?order=desc", "/v1/messages/batches?after=a"])
def test_a_query_that_a_list_does_not_know_is_refused(server: Server, path: str) -> None:
    assert get(server, path.partition("?")[0])[0] == 200
    status, body, _ = get(server, path)
    name = path.partition("?")[2].partition("=")[0]
    assert status == 400 and f"query.{name}: unknown field" in body["error"]["message"]
    assert get(server, "/v1/files?limit=1&purpose=batch")[0] == 200
    status, body, headers = get(server, "/v1/models?limit=5&thread=a")
    assert status == 200 and len(body["data"]) == 1 and headers["x-workbench-ignored"] == "query.thread"
    found = httpx.post(f"{server.url}/v1/messages/count_tokens?beta=true", json=COUNTED, timeout=limit(60))
    assert found.status_code == 200 and found.headers["x-workbench-ignored"] == "query.beta"


def test_what_is_ignored_is_listed_in_the_response_and_in_the_trace(server: Server) -> None:
    extra = {"thread": {"id": 1}, "store": True, "top_p": 0, "seed": None, "a\n,b": 1}
    for stream in (False, True):
        body = {**ASK, **extra, "stream": stream, "tools": [{**CALCULATE, "cache_control": {}}]}
        found = httpx.post(server.url + CHAT, json=body, timeout=limit(60))
        listed = {*found.headers["x-workbench-ignored"].split(", ")}
        assert found.status_code == 200 and listed == {"thread", "store", "a_b", "tools.0.cache_control"}
        trace = get(server, f"/v1/traces/{found.headers['x-request-id']}")[1]
        assert {*trace["ignored"]} == {"thread", "store", "a\n,b", "tools.0.cache_control"}
        assert trace["sampling"]["top_p"] == 0


def test_strict_servers_refuse_unknown_fields(chat_runner: Runner) -> None:
    with serve(chat_runner, unknown_fields="refuse") as server:
        status, body = ask(server, thread=1)
        assert status == 400 and body["error"]["param"] == "thread" and body["error"]["code"] == "unknown"
        assert get(server, "/v1/models?thread=a")[0] == 400 and ask(server, store=True)[0] == 200


def test_errors_have_the_shape_of_their_protocol(server: Server) -> None:
    status, found, _ = get(server, "/v1/no/such/route")
    assert status == 404 and set(found["error"]) == {"message", "type", "param", "code"}
    status, found, _ = get(server, "/v1/no/such/route", **{"anthropic-version": "2023-06-01"})
    assert status == 404 and found["type"] == "error" and found["error"]["type"] == "not_found_error"
    status, found, _ = get(server, CHAT)
    assert status == 405 and "GET" in found["error"]["message"]
    for body in (b"", b"{", b"[1]", b'{"a": 1' + b"[" * 5000, b"\xff\xfe"):
        with connect(server) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            raw = read_until(connection, lambda raw: False)
        assert b"400 Bad Request" in raw and b'"message"' in raw
    with connect(server) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999\r\n\r\n".encode())
        assert b" 413 " in read_until(connection, lambda raw: b"\r\n\r\n" in raw)


def test_an_engine_that_fails_is_an_error_and_then_answers_again(
    server: Server, chat_runner: Runner, gate: RecordingGate, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain call gets 503, a stream an event and an end; the next call is answered.

    No client sees the engine's words, which may hold what others sent; administrators find them in the trace.
    """
    for error in (RuntimeError("the board is on fire"), SystemExit("gone")):
        with held_steps(chat_runner) as steps, connect(server) as stream:
            stream.sendall(
                post(CHAT, {**ASK, "stream": True, "ignore_eos": True, "max_tokens": 50}, connection="close")
            )
            assert steps.waiting.wait()
            steps.allow(2)
            begun = read_until(stream, lambda raw: b"data: " in raw)
            answers: list[tuple[int, Any]] = []
            plain = threading.Thread(target=lambda answers=answers: answers.append(ask(server)))
            plain.start()
            until(lambda: len(server.service.runs) == 2)

            def broken(queue: deque[Any] | None = None, error: BaseException = error) -> None:
                raise error

            steps._step, steps._free = broken, True  # each step from now on: the second call may begin at the next
            steps.allow()
            plain.join()
            whole = begun + read_until(stream, lambda raw: False)
            steps._step = type(chat_runner).step.__get__(chat_runner)
        assert events_of(whole)[-1]["error"]["type"] == "server_error"
        assert answers[0][0] == 503, answers
        assert str(error) not in whole.decode() + str(answers) and str(error) in caplog.text
        name = next(each for each in events_of(whole) if "id" in each)["id"]
        trace = server.service.traces.get(name, Caller(scopes=frozenset({ADMIN})))
        assert trace is not None and str(error) in trace.as_json(Caller(scopes=frozenset({ADMIN})))["failure"]
        assert str(error) not in str(trace.as_json(Caller()))
        until(lambda: not server.service.runs)
        assert ask(server)[0] == 200
    assert {outcome.ended for _, outcome in gate.outcomes[-5:]} == {"failed", "finished"}


def test_overload_is_refused_while_admitted_streams_go_on(
    server: Server, chat_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service, "settings", server.settings.model_copy(update={"max_waiting": 3}))
    with held_steps(chat_runner) as steps:
        waiting = [connect(server) for _ in range(3)]
        for each in waiting:
            each.sendall(post(CHAT, {**ASK, "stream": True}, connection="close"))
        until(lambda: len(server.service.runs) == 3)
        with connect(server) as late:
            late.sendall(post(CHAT, ASK, connection="close"))
            refused = read_until(late, lambda raw: False)
        assert b" 503 " in refused.splitlines()[0] and b"retry-after: 1" in refused
        steps.release()
        for each in waiting:
            assert events_of(read_until(each, lambda raw: False))[-1] == "[DONE]"
            each.close()


def test_stopping_lets_streams_end(chat_runner: Runner) -> None:
    server = workbench.serve(chat_runner)
    with held_steps(chat_runner) as steps, connect(server) as stream:
        stream.sendall(post(CHAT, {**ASK, "stream": True}))
        assert steps.waiting.wait()
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        until(lambda: server.service.is_draining)
        steps.release()
        assert events_of(read_until(stream, lambda raw: False))[-1] == "[DONE]"
        stopping.join()
    assert not server.is_running
    server.stop()  # a second time does nothing


def test_what_does_not_end_in_time_ends_with_an_error(chat_runner: Runner) -> None:
    server = workbench.serve(chat_runner)
    with held_steps(chat_runner) as steps, connect(server) as stream:
        stream.sendall(post(CHAT, {**ASK, "stream": True, "max_tokens": 100, "ignore_eos": True}))
        assert steps.waiting.wait()
        steps.allow(2)
        begun = read_until(stream, lambda raw: b"data: " in raw)
        stopping = threading.Thread(target=lambda: server.stop(0))
        stopping.start()
        whole = begun + read_until(stream, lambda raw: False)
        assert "shutting down" in events_of(whole)[-1]["error"]["message"]
        steps.release()
        stopping.join()


def test_several_models_by_name(chat_runner: Runner) -> None:
    small = workbench.load("demo-draft", backend="eager")
    with workbench.serve({"chat": chat_runner, "small": small}) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0)
        assert {each.id for each in client.models.list()} == {"chat", "small"}
        assert client.completions.create(model="small", prompt="def f", max_tokens=4).usage.completion_tokens == 4  # type: ignore[union-attr] (it has)
        assert client.chat.completions.create(**{**ASK, "model": "chat"}).model == "chat"
        with pytest.raises(openai.NotFoundError, match="chat"):
            client.chat.completions.create(**{**ASK, "model": "demo-chat"})


def test_what_cannot_be_served_is_said(server: Server, chat_runner: Runner) -> None:
    with pytest.raises(WorkbenchError, match="prot"):
        workbench.serve(chat_runner, prot=1)
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(WorkbenchError, match="choose another"):
        workbench.serve(chat_runner, port)


def test_settings_are_one_value(tmp_path: Any) -> None:
    config = read_serve_config("demo", ("cache.format=int8", "server.port=0"))
    assert config.cache.format == "int8" and config.server.port == 0 and config.cache.prefix.kind == "radix"
    file = tmp_path / "a.yaml"
    file.write_text("question: Does it serve?\nmodel: demo-chat\nworkload: {kind: random}\ngateway: {keys: k.json}\n")
    config = read_serve_config(str(file), ("backend=eager",))
    assert config.model.name == "demo-chat" and config.backend == "eager" and config.gateway == {"keys": "k.json"}
    with pytest.raises(WorkbenchError, match=r"server\.prot"):
        read_serve_config("demo", ("server.prot=1",))


@pytest.mark.processes
def test_the_command_serves_until_sigterm() -> None:
    command = ["-m", "workbench", "serve", "demo-draft", "--port", "0", "--set", "backend=eager", "--json"]
    with start_python(*command, stdout=PIPE) as process:
        said = ""
        while not said.endswith("}\n"):
            assert (line := process.stdout.readline()), "the server did not start"
            said += line
        client = openai.OpenAI(base_url=json.loads(said)["url"] + "/v1", api_key="a", max_retries=2)
        stream = client.completions.create(model="demo-draft", prompt="def f", max_tokens=40, stream=True)
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        assert process.wait() in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
