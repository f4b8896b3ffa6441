"""Clients that leave, at every byte and in every phase: their pages are free within one step, and they are counted."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.patience import limit, until
from tests.serve.serving import RecordingGate, connect, events_of, held_steps, pages_used, post, read_until
from workbench.engine.runner import Runner
from workbench.serve.served_model import PreparedPrompt
from workbench.serve.server import Server

CHAT = "/v1/chat/completions"
LONG = {"role": "user", "content": "count " * 300}


def body(**options: Any) -> dict[str, Any]:
    base = {"model": "demo-chat", "messages": [LONG], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    return {**base, **options}


def test_a_request_may_break_off_at_every_byte(server: Server, gate: RecordingGate) -> None:
    request = post(CHAT, {"model": "demo-chat", "messages": [{"role": "user", "content": "a"}], "stream": True})
    before = len(gate.outcomes)
    threads = threading.active_count()
    for length in range(0, len(request)):
        with connect(server) as connection:
            connection.sendall(request[:length])
    with connect(server) as connection:
        connection.sendall(request)
    until(lambda: len(gate.outcomes) == before + 1)  # the whole one alone began
    assert gate.outcomes[-1][1].ended in ("cancelled", "finished")
    assert threading.active_count() <= threads + 2  # the runner's thread, and a thread for prompts


def test_a_stream_may_break_off_at_every_event(server: Server, gate: RecordingGate) -> None:
    for count in range(1, 12):
        before = len(gate.outcomes)
        with connect(server) as connection:
            connection.sendall(post(CHAT, body(stream=True)))
            read_until(connection, lambda raw, count=count: raw.count(b"data: ") >= count)
        until(lambda before=before: len(gate.outcomes) == before + 1)
        call, outcome = gate.outcomes[-1]
        assert outcome.ended == "cancelled"
        assert count <= outcome.used.completion_tokens < 200  # all that was generated, seen or not
        assert outcome.used.prompt_tokens > 60 and call.stream


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_pages_are_free_within_one_step(
    server: Server, gate: RecordingGate, chat_runner: Runner, phase: str, stream: bool
) -> None:
    before = len(gate.outcomes)
    with held_steps(chat_runner) as steps:
        connection = connect(server)
        connection.sendall(post(CHAT, body(stream=stream)))
        assert steps.waiting.wait()
        for _ in range({"queue": 0, "prefill": 1, "decode": 5}[phase]):
            done = steps.done
            steps.allow()
            until(lambda done=done: steps.done > done and steps.waiting.is_set())
        if phase != "queue":
            assert pages_used(chat_runner) > 0
        if stream and phase == "decode":
            assert b"data: " in read_until(connection, lambda raw: b"data: " in raw)
        connection.close()
        (run,) = server.service.runs
        until(lambda: run.has_left)
        steps.allow()  # one step: the one that was about to begin
        until(lambda: len(gate.outcomes) == before + 1)
        assert pages_used(chat_runner) == 0
    _, outcome = gate.outcomes[-1]
    assert outcome.ended == "cancelled"
    assert (outcome.used.completion_tokens > 0) == (phase == "decode")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_a_client_that_leaves_while_its_prompt_is_prepared(
    server: Server, gate: RecordingGate, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    before, (model,) = len(gate.outcomes), server.service.models.values()
    prepare, begun, may_end = model.prepare, threading.Event(), threading.Event()

    def held(*given: Any) -> list[PreparedPrompt]:
        begun.set()
        assert may_end.wait(limit(60))
        return prepare(*given)

    monkeypatch.setattr(model, "prepare", held)
    with connect(server) as connection:
        connection.sendall(post(CHAT, body(stream=stream)))
        assert begun.wait(limit(60))
    (run,) = server.service.runs
    until(lambda: run.has_left)
    may_end.set()
    until(lambda: len(gate.outcomes) == before + 1)
    assert gate.outcomes[-1][1].ended == "cancelled" and gate.outcomes[-1][1].used.prompt_tokens == 0


def test_a_reader_that_stands_still_is_let_go(
    server: Server, gate: RecordingGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service, "settings", server.settings.model_copy(update={"max_buffered_pieces": 20}))
    before = len(gate.outcomes)
    with connect(server) as connection:
        connection.sendall(post(CHAT, body(stream=True, n=4, max_tokens=60), connection="close"))
        (run,) = until_some(server)
        block = run.next

        async def never() -> Any:  # as a connection whose buffers are full
            monkeypatch.setattr(run, "next", block)
            while not (run._stream._has_failed or run._stream.ended.is_set()):
                await asyncio.sleep(0.01)
            return await block()

        monkeypatch.setattr(run, "next", never)
        assert b"does not read" in read_until(connection, lambda raw: False)
    until(lambda: len(gate.outcomes) == before + 1)
    assert gate.outcomes[-1][1].ended == "failed" and gate.outcomes[-1][1].used.completion_tokens >= 15


def until_some(server: Server) -> list[Any]:
    until(lambda: server.service.runs)
    return list(server.service.runs)


def test_requests_with_one_id_are_two(server: Server) -> None:
    """The id that a client gives is its own affair: calls have ids of the server's."""
    connections = [connect(server) for _ in range(2)]
    for connection in connections:
        connection.sendall(post(CHAT, body(stream=True, max_tokens=8), x_request_id="one"))
    found = [events_of(read_until(each, lambda raw: raw.endswith(b"0\r\n\r\n"))) for each in connections]
    assert len({each[0]["id"] for each in found}) == 2
    assert [len(each) for each in found] == [len(found[0])] * 2
    for connection in connections:
        connection.close()


def test_a_silent_stream_is_pinged(server: Server, chat_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "settings", server.settings.model_copy(update={"ping_seconds": 0.2}))
    with held_steps(chat_runner) as steps, connect(server) as connection:
        connection.sendall(post(CHAT, body(stream=True, max_tokens=4)))
        early = read_until(connection, lambda raw: raw.count(b": ping") >= 2)
        assert b"data: " not in early and b"200 OK" in early
        steps.release()
        found = events_of(early + read_until(connection, lambda raw: raw.endswith(b"0\r\n\r\n")))
    assert found[-1] == "[DONE]" and len(found) > 4
