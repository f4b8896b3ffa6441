"""A step of the engine that does not end: calls fail instead of waiting for ever, and the server still stops."""

from __future__ import annotations

import signal
import socket
import threading
from functools import partial

import httpx
import pytest

import workbench
from tests.helpers.processes import PIPE, start_python
from tests.patience import limit, until
from tests.serve import serving
from tests.serve.serving import RecordingGate, connect, events_of, held_steps, pages_used, post, read_until
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.gateway.gate import Gateway
from workbench.serve import service
from workbench.serve.server import Server

CHAT = "/v1/chat/completions"
ASK = {"model": "demo-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "ignore_eos": True}
# A server whose engine hangs at its first step. It says its port, and ends by SIGTERM.
HANGING_SERVER = """
import threading
import workbench
from workbench.serve.config import ServerSettings
from workbench.serve.served_model import ServedModel
from workbench.serve.server import Server
runner = workbench.load("demo-draft", backend="eager")
runner.step = lambda queue=None: threading.Event().wait()
settings = ServerSettings(port=0, drain_seconds=0.1)
server = Server({"demo-draft": ServedModel("demo-draft", runner)}, None, settings)
print(server.url.rsplit(":", 1)[1], flush=True)
server.run()
"""


def test_a_step_that_does_not_end_fails_its_calls_until_it_ends(chat_runner: Runner) -> None:
    gate = RecordingGate()
    with workbench.serve(chat_runner, gate=gate, step_seconds=None) as server:
        with held_steps(chat_runner) as steps, connect(server) as stream, connect(server) as plain:
            steps.allow(3)
            stream.sendall(post(CHAT, {**ASK, "stream": True}, connection="close"))
            begun = read_until(stream, lambda raw: b"data: " in raw)
            limit_steps(server, 0.5)
            plain.sendall(post(CHAT, ASK, connection="close"))
            ended = events_of(begun + read_until(stream, lambda raw: False))[-1]
            assert "has not ended" in ended["error"]["message"]
            refused = read_until(plain, lambda raw: False)
            assert b" 503 " in refused.splitlines()[0] and b"has not ended" in refused
            until(lambda: not server.service.runs)  # settled, though the engine has not let go of them
            assert [outcome.ended for _, outcome in gate.outcomes] == ["failed"] * len(gate.outcomes)
            for path in (CHAT, "/v1/embeddings"):
                body = ASK if path == CHAT else {"model": "demo-chat", "input": "hi"}
                answer = httpx.post(server.url + path, json=body, timeout=limit(60))
                assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
            health = httpx.get(server.url + "/health")
            assert health.status_code == 503 and health.json()["status"] == "stuck"
            assert "has not ended" in health.json()["models"]["demo-chat"]
            steps.release()
            until(lambda: httpx.get(server.url + "/health").status_code == 200)
            limit_steps(server, None)  # no step is slow
        assert httpx.post(server.url + CHAT, json=ASK, timeout=limit(60)).status_code == 200
        until(lambda: not server.service.runs)
    assert RunnerThread.attach(chat_runner).call(pages_used) == 0


def test_a_server_stops_though_a_step_does_not_end(chat_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SETTLE_SECONDS", 0.2)
    gate = RecordingGate()
    server = workbench.serve(chat_runner, gate=gate)
    with held_steps(chat_runner) as steps, connect(server) as connection:
        connection.sendall(post(CHAT, ASK))
        assert steps.waiting.wait()
        stopping = threading.Thread(target=lambda: server.stop(0))
        stopping.start()
        stopping.join()
        assert not server.is_running and steps.waiting.is_set()
        assert [outcome.ended for _, outcome in gate.outcomes] == ["failed"]
        assert b"shutting down" in read_until(connection, lambda raw: False)


def test_a_server_stops_though_a_line_of_a_batch_waits_for_a_step(
    chat_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SETTLE_SECONDS", 0.2)
    gate = RecordingGate()
    server = workbench.serve(chat_runner, gate=gate)
    with held_steps(chat_runner) as steps:
        params = {"model": "demo-chat", "messages": ASK["messages"], "max_tokens": 50}
        body = {"requests": [{"custom_id": str(number), "params": params} for number in range(3)]}
        made = httpx.post(f"{server.url}/v1/messages/batches", json=body, timeout=limit(60))
        assert made.status_code == 200 and steps.waiting.wait()
        cancelled = httpx.post(f"{server.url}/v1/messages/batches/{made.json()['id']}/cancel", timeout=limit(60))
        assert cancelled.status_code == 200  # its calls wait for the engine to let go of them
        until(lambda: all(run.has_ended for run in server.service.runs))
        stopping = threading.Thread(target=lambda: server.stop(0))
        stopping.start()
        stopping.join(limit(60))
        assert not stopping.is_alive() and steps.waiting.is_set(), "the server waited for the step"
        assert gate.outcomes and not server.service.runs


@pytest.mark.parametrize("has_fallback", [True, False], ids=["fallback", "none"])
def test_another_model_answers_for_one_whose_step_does_not_end(chat_runner: Runner, has_fallback: bool) -> None:
    """The gate chooses the model before the server asks whether its engine is stuck."""
    small = load("demo-draft", backend="eager", max_num_batched_tokens=64, page_size=16)
    gate = Gateway({"router": {"fallbacks": {"large": ["small"]}}} if has_fallback else {})
    models = {"large": chat_runner, "small": small}
    body = {"model": "large", "prompt": "def f", "max_tokens": 4}
    with workbench.serve(models, gate=gate, step_seconds=None) as server, held_steps(chat_runner) as steps:
        with connect(server) as connection:
            connection.sendall(post("/v1/completions", body, connection="close"))
            assert steps.waiting.wait()
            limit_steps(server, 0.5)
            assert b" 503 " in read_until(connection, lambda raw: False).splitlines()[0]
        for path in ("/v1/completions", "/v1/embeddings"):
            given = body if path == "/v1/completions" else {"model": "large", "input": "hi"}
            answer = httpx.post(server.url + path, json=given, timeout=limit(60))
            if has_fallback:
                assert answer.status_code == 200 and answer.json()["model"] == "small", answer.text
            else:
                assert answer.status_code == 503 and "has not ended" in answer.text and answer.headers["retry-after"]
        until(lambda: not server.service.runs)


def test_a_call_that_a_test_leaves_is_reported_and_ended(chat_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_idle`, which follows each test of the shared server."""
    with workbench.serve(chat_runner) as server, connect(server) as connection:
        with held_steps(chat_runner) as steps, monkeypatch.context() as patch:
            patch.setattr(serving, "until", partial(until, seconds=0.1))
            connection.sendall(post(CHAT, ASK))
            assert steps.waiting.wait()
            with pytest.raises(AssertionError, match=r"left the server at work: \[\('openai.chat', "):
                serving.check_idle(server, chat_runner)
        assert b"shutting down" in read_until(connection, lambda raw: b"shutting down" in raw)
        serving.check_idle(server, chat_runner)


@pytest.mark.processes
def test_a_process_ends_by_sigterm_though_a_step_does_not_end() -> None:
    with start_python("-c", HANGING_SERVER, stdout=PIPE) as process:
        port = int(process.stdout.readline())
        body = {"model": "demo-draft", "prompt": "def f", "max_tokens": 4}
        connection = connect_when_ready(port)
        connection.sendall(post("/v1/completions", body))
        until(lambda: "vllm:num_requests_waiting" in metrics_of(port))
        process.send_signal(signal.SIGTERM)
        assert b"shutting down" in read_until(connection, lambda raw: b"shutting down" in raw)
        assert process.wait() in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def limit_steps(server: Server, seconds: float | None) -> None:
    """Set the limit of a step while the server runs: with it from the beginning, a machine that pauses for so long
    makes an idle engine count as stuck, and another model answers the call that the test holds."""
    server.service.settings = server.settings.model_copy(update={"step_seconds": seconds})


def connect_when_ready(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=limit(60))


def metrics_of(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=limit(60)).text
