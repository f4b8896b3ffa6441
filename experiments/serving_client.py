"""Send many requests to a server on this machine, and record the time of each event: a small load generator.

`ClientProcess` runs it in a separate process, so that its work does not slow the server: this module then reads a line
of JSON with `url`, `at_once` and `asks`, and prints a line of answers. Times are `time.perf_counter`, which processes
of one machine share on Linux.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Ask:
    """One request: a POST of `body` to `path`, sent `after` seconds from the start.

    `leave_after` closes the connection after this number of events (0: as soon as the request is sent); None reads all.
    """

    path: str
    body: dict[str, Any]
    after: float = 0.0
    leave_after: int | None = None
    key: str = ""


@dataclass
class Reply:
    """The reply to one request: its HTTP status (0 if the client left first), its events, and the time of each."""

    sent: float = 0.0
    status: int = 0
    times: list[float] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    left: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON body of a reply that is not a stream."""
        return json.loads(self.events[-1])


async def ask(url: str, request: Ask, keep_events: bool = True, reply: Reply | None = None) -> Reply:
    """Send one request over a new connection and read the reply to its end, or leave earlier as the request says.

    `reply` is filled and returned, so that another task can see how far it has come; a new one unless given.
    """
    where, reply = urlsplit(url), reply or Reply()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        payload = json.dumps(request.body).encode()
        authorization = f"authorization: Bearer {request.key}\r\n" if request.key else ""
        writer.write(
            f"POST {request.path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n{authorization}"
            f"connection: close\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        reply.sent = time.perf_counter()
        await writer.drain()
        if request.leave_after == 0:
            reply.left = True
            return reply
        async for event in _events(reader, reply):
            reply.times.append(time.perf_counter())
            reply.events.append(event if keep_events else event[-400:])
            if request.leave_after is not None and len(reply.times) >= request.leave_after:
                reply.left = True
                return reply
        return reply
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader, reply: Reply) -> AsyncIterator[str]:
    """Yield the data of each event of a stream, or the body of another answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    reply.status = int(head[0].split()[1])
    reply.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
    rest = b""
    async for piece in _body(reader, reply.headers):
        rest += piece
        while is_stream and b"\n\n" in rest:
            event, _, rest = rest.partition(b"\n\n")
            data = [line[6:] for line in event.decode().split("\n") if line.startswith("data: ")]
            if data:
                yield data[0]
    if rest.strip():
        yield rest.decode()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") != "chunked":
        while piece := await reader.read(READ_BYTES):
            yield piece
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def ask_all(
    url: str, requests: Sequence[Ask], at_once: int | None = None, keep_events: bool = True
) -> list[Reply]:
    """Send requests at their times, at most `at_once` of them open at any moment; return the replies in the order of
    the requests."""
    places, began = asyncio.Semaphore(at_once or len(requests) or 1), time.perf_counter()

    async def one(request: Ask) -> Reply:
        await asyncio.sleep(max(0.0, began + request.after - time.perf_counter()))
        async with places:
            return await ask(url, request, keep_events)

    return list(await asyncio.gather(*map(one, requests)))


class ClientProcess:
    """A client in a separate process that lives as long as its `with` block, so that no client starts while times are
    measured.

    with ClientProcess() as client:
        replies = client.ask_all(url, asks)
    """

    def __enter__(self) -> ClientProcess:
        command = [sys.executable, "-m", "experiments.serving_client"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask_all(self, url: str, requests: Sequence[Ask], at_once: int | None = None) -> list[Reply]:
        """Run `ask_all` in the client's process and return the replies, with events cut to their last 400
        characters."""
        assert self._process.stdin is not None and self._process.stdout is not None
        given = {"url": url, "at_once": at_once, "asks": [asdict(each) for each in requests]}
        print(json.dumps(given), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client's process ended with {self._process.wait()}")
        return [Reply(**each) for each in json.loads(line)]


def main() -> None:
    for line in sys.stdin:
        given = json.loads(line)
        asks = [Ask(**each) for each in given["asks"]]
        replies = asyncio.run(ask_all(given["url"], asks, given["at_once"], keep_events=False))
        print(json.dumps([asdict(each) for each in replies]), flush=True)


if __name__ == "__main__":
    main()
