"""Servers for tests: a gate that keeps outcomes, steps that wait for permission, and requests written by hand."""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.patience import limit, until
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.serve.call import Call
from workbench.serve.gate import OpenGate, OpenLease, Outcome
from workbench.serve.server import Server
from workbench.trace.events import Event

Json = dict[str, Any]
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


class _RecordingLease(OpenLease):
    def __init__(self, call: Call, outcomes: list[tuple[Call, Outcome]]):
        super().__init__(call)
        self._outcomes = outcomes

    async def settle(self, outcome: Outcome) -> None:
        self._outcomes.append((self.call, outcome))


class RecordingGate(OpenGate):
    """A gate that lets all through and keeps how each call ended."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[Call, Outcome]] = []

    async def admit(self, call: Call) -> OpenLease:
        return _RecordingLease(call, self.outcomes)


class HeldSteps:
    """Steps of a runner that wait until they are allowed, one by one; `release` lets all go."""

    def __init__(self, runner: Runner):
        self._step, self._runner = runner.step, runner
        self._permits, self._free = threading.Semaphore(0), False
        self.waiting = threading.Event()  # a step is about to begin
        self.done = 0
        runner.step = self._held  # type: ignore[method-assign] (what the test holds)

    def _held(self, queue: deque[Event] | None = None) -> None:
        if not self._free:
            self.waiting.set()
            self._permits.acquire()
            self.waiting.clear()
        self._step(queue)
        self.done += 1

    def allow(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()

    def release(self) -> None:
        self._free = True
        self._permits.release()
        self._runner.step = self._step  # type: ignore[method-assign] (its own again)


@contextmanager
def held_steps(runner: Runner) -> Iterator[HeldSteps]:
    steps = HeldSteps(runner)
    try:
        yield steps
    finally:
        steps.release()


def check_idle(server: Server, runner: Runner) -> None:
    """Assert that a server has no call under way and its runner no page in use; what a test has left is ended, so that
    the next one finds the server free."""
    try:
        until(lambda: not server.service.runs)
        assert RunnerThread.attach(runner).submit_call(pages_used).result(limit(30)) == 0, "pages are in use"
    except (AssertionError, TimeoutError) as error:
        left = [(run.call.dialect, run.call.id) for run in server.service.runs]
        bridge = next(iter(server.service._bridges.values()))
        bridge._loop.call_soon_threadsafe(server.service.end_all)
        raise AssertionError(f"the test left the server at work: {left}") from error


def pages_used(runner: Runner) -> int:
    return sum(pool.num_used for pool in runner.scheduler.pools)


def post(path: str, body: Mapping[str, Any], **headers: str) -> bytes:
    """Return a request as it goes over the wire."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json", f"content-length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=limit(60))


def read_until(connection: socket.socket, found: Callable[[bytes], bool]) -> bytes:
    """Return what arrives until `found`, or until the end."""
    whole = b""
    while not found(whole) and (part := connection.recv(65536)):
        whole += part
    return whole


def events_of(raw: bytes) -> list[Any]:
    """Return the events of a stream's body; its chunked coding is taken off."""
    _, _, body = raw.partition(b"\r\n\r\n")
    text = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        text += rest[:length]
        body = rest[length + 2 :] if length else b""
    lines = [each.removeprefix(b"data: ") for each in text.split(b"\n\n") if each.startswith(b"data: ")]
    return [each.decode() if each == b"[DONE]" else json.loads(each) for each in lines]
