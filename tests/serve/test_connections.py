"""Connections whose clients leave something undone: a request, its header or body, or to read what was answered."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import workbench
from tests.helpers.processes import PIPE, start_python
from tests.patience import limit, until
from tests.serve.serving import Json, RecordingGate, connect, events_of, held_steps, post, read_until
from tests.thorough import THOROUGH
from workbench.engine.runner import Runner
from workbench.serve.dialects.openai.chat import OpenAIChat
from workbench.serve.server import Server

CHAT = "/v1/chat/completions"
ASK = {"model": "demo-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
NUM_SILENT = 10_000 if THOROUGH else 2_000
# Opens connections that say nothing, and says when they are open, and when the server has closed all of them.
SILENT_CLIENTS = """
import resource, select, socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
opened = {each.fileno(): each for each in (socket.create_connection(("127.0.0.1", port)) for _ in range(count))}
print("open", flush=True)
poll = select.poll()
for number in opened:
    poll.register(number, select.POLLIN)
while opened:
    for number, _ in poll.poll():
        assert opened[number].recv(1) == b"", "the server has said something"
        poll.unregister(number)
        opened.pop(number).close()
print("closed", flush=True)
"""


def connections_of(server: Server) -> list[Any]:
    return list(server._http.server_state.connections)


def num_connections(server: Server) -> int:
    return len(connections_of(server))


@contextmanager
def small_buffers(server: Server) -> Iterator[socket.socket]:
    """Connect so that little is on its way: what the client does not read waits in the server."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(limit(60))
        connection.connect((host, int(port)))
        yield connection


def is_answered(server: Server) -> bool:
    with connect(server) as connection:
        connection.sendall(post(CHAT, ASK, connection="close"))
        return b" 200 OK" in read_until(connection, lambda raw: False).splitlines()[0]


def send_until_closed(connection: socket.socket, text: bytes) -> bytes:
    """Send a byte now and then until the server closes the connection; return what it said."""
    said = b""
    while True:
        if select.select([connection], [], [], 0.05)[0]:
            try:
                part = connection.recv(65536)
            except ConnectionResetError:
                return said
            if not part:
                return said
            said += part
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it said is still to be read
            connection.sendall(text)


def test_many_silent_connections_do_no_harm_and_end(chat_runner: Runner) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(NUM_SILENT, hard - 1_000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with workbench.serve(chat_runner, idle_seconds=3600.0) as server:
            port = server.url.rsplit(":", 1)[1]
            with start_python("-c", SILENT_CLIENTS, port, str(count), stdout=PIPE) as clients:
                assert clients.stdout.readline() == "open\n"
                until(lambda: num_connections(server) == count)
                assert is_answered(server)
                assert num_connections(server) >= count
                server.service.settings = server.settings.model_copy(update={"idle_seconds": 0.1})
                assert clients.stdout.readline() == "closed\n"
            until(lambda: num_connections(server) == 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("begin", "more", "says"),
    [
        (b"POST /v1/chat", b"a", b""),
        (b"GET /health HTTP/1.1\r\nx-a: ", b"a", b""),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9999999\r\n\r\n", b" ", b" 413 "),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 999999\r\n\r\n", b" ", b"did not arrive"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 999999\r\n\r\n", b" ", b" 200 OK"),
    ],
    ids=["line", "header", "too long", "body", "body of a route that reads none"],
)
def test_half_a_request_ends_though_a_byte_comes_now_and_then(
    chat_runner: Runner, begin: bytes, more: bytes, says: bytes
) -> None:
    idle = 3600.0 if begin.startswith(b"POST") else 0.3  # what was refused is closed at once, without a silence
    times: Json = {"idle_seconds": idle, "header_seconds": 0.3, "body_seconds": 0.3}
    with workbench.serve(chat_runner, **times) as server, connect(server) as connection:
        connection.sendall(begin)
        assert says in send_until_closed(connection, more)
        assert is_answered(server)


def test_a_header_has_its_own_time_after_a_silence(chat_runner: Runner) -> None:
    """A client that was silent for long, as it may be, can still ask."""
    times: Json = {"idle_seconds": 3600.0, "header_seconds": 3600.0}
    with workbench.serve(chat_runner, **times) as server, connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        (held,) = until_connected(server)
        held._silent_since -= 3000.0
        held.check(server.settings, held._header_since + 3000.0)
        assert not held.transport.is_closing()
        held.check(server.settings, held._header_since + 3601.0)
        assert held.transport.is_closing()


def until_connected(server: Server) -> list[Any]:
    until(lambda: any(each._header_since is not None for each in connections_of(server)))
    return list(server._http.server_state.connections)


def test_a_stream_that_is_never_read_is_cut(chat_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenAIChat, "ping", b": " + bytes(4 << 20) + b"\n\n")
    gate = RecordingGate()
    with workbench.serve(chat_runner, gate=gate, send_seconds=0.3, ping_seconds=0.1) as server:
        with held_steps(chat_runner), small_buffers(server) as connection:
            connection.sendall(post(CHAT, {**ASK, "stream": True}))
            until(lambda: num_connections(server) == 1)
            until(lambda: num_connections(server) == 0)
        until(lambda: gate.outcomes)
        assert gate.outcomes[0][1].ended == "cancelled"


def test_an_answer_that_is_never_read_is_cut(chat_runner: Runner) -> None:
    """Also after it was handed over whole, when no call is under way."""
    with workbench.serve(chat_runner, send_seconds=0.3, max_body_bytes=1 << 20) as server:
        for ending in ("close", "keep-alive"):
            with small_buffers(server) as connection:
                connection.sendall(post("/tokenize", {"prompt": "word " * 50_000}, connection=ending))
                until(lambda: num_connections(server) == 1)
                until(lambda: num_connections(server) == 0)


def test_an_answer_that_is_read_slowly_arrives_whole(chat_runner: Runner) -> None:
    """Reading goes on for longer than `send_seconds`, and never fast."""
    with workbench.serve(chat_runner, send_seconds=1.0) as server, small_buffers(server) as connection:
        connection.sendall(post("/tokenize", {"prompt": "word " * 100_000}, connection="close"))
        raw = b""
        while part := connection.recv(4096):
            raw += part
            if len(raw) % (1 << 16) < 4096:
                select.select([], [], [], 0.2)
        head, _, body = raw.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head and len(body) > 300_000


def test_a_slow_reader_holds_back_only_itself(chat_runner: Runner) -> None:
    gate = RecordingGate()
    slow_ask = {**ASK, "stream": True, "n": 8, "max_tokens": 200, "ignore_eos": True}
    with workbench.serve(chat_runner, gate=gate) as server, small_buffers(server) as slow:
        slow.sendall(post(CHAT, slow_ask))
        until(lambda: is_paused(server))
        with connect(server) as quick:
            quick.sendall(post(CHAT, {**ASK, "stream": True, "max_tokens": 20, "ignore_eos": True}))
            found = events_of(read_until(quick, lambda raw: raw.endswith(b"0\r\n\r\n")))
        assert found[-1] == "[DONE]" and len(found) > 10
        assert is_paused(server)  # the other one still waits to be read
        whole = read_until(slow, lambda raw: raw.endswith(b"0\r\n\r\n"))
        assert whole.count(b'"finish_reason":"length"') == 8
        until(lambda: len(gate.outcomes) == 2)
        assert {outcome.ended for _, outcome in gate.outcomes} == {"finished"}


def is_paused(server: Server) -> bool:
    return any(each.flow.write_paused for each in connections_of(server))
