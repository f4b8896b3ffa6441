"""Answer a request of a dialect over HTTP, streamed or whole, and cancel it when its client disconnects."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from workbench.serve.answers.pieces import num_values
from workbench.serve.errors import ApiError
from workbench.serve.json_bytes import dumps
from workbench.serve.service import as_api_error

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from workbench.serve.answers.pieces import Piece
    from workbench.serve.call import Call
    from workbench.serve.call_run import CallRun
    from workbench.serve.dialect import Dialect
    from workbench.serve.service import Service

JSON = "application/json"
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
MAX_ON_LOOP = 2_000  # maximum values of an answer written in the event loop: a few milliseconds
IGNORED_HEADER, MAX_HEADER = "x-workbench-ignored", 1000
CLIENT_CLOSED = 499  # nginx's status for a client that has disconnected


def json_response(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(value), status, {"content-type": JSON, **(headers or {})})


def error_response(error: ApiError, dialect: Dialect, request_id: str = "") -> Response:
    """Return an error in the dialect's shape."""
    request_id = request_id or f"req_{secrets.token_hex(12)}"  # for a request that became no call
    status, body = dialect.error(error, request_id)
    headers = {"x-request-id": request_id, dialect.request_id_header: request_id}
    return json_response(status, body, {**headers, **error.headers})


async def answer(service: Service, request: Request, dialect: Dialect) -> Response:
    """Return the HTTP response to a request of a dialect's main route."""
    request_id = ""
    try:
        call = await service.read(request, dialect)
        request_id = call.id
        run = service.arrive(call)
    except Exception as error:  # any error: the client sees it in its protocol
        return error_response(as_api_error(error), dialect, request_id)
    watch = asyncio.create_task(_watch(request, run))
    handed_over = False
    try:
        await run.admit()
        await run.start()
        if call.stream:
            first = await _first_pieces(run, service.settings.ping_seconds)
            if not run.has_left:
                stream = AnswerStream(service, run, dialect, first, watch)
                handed_over = True
                return stream
        else:
            pieces: list[Piece] = []
            while (fresh := await run.next()) is not None:
                pieces += fresh
            await run.settle()
            if not run.has_left:
                content = await _whole_answer(service, run.call, dialect, pieces)
                return Response(content, 200, {"content-type": JSON, **headers_of(run, dialect)})
        return Response(status_code=CLIENT_CLOSED)
    except Exception as error:  # as above
        run.fail(failure := as_api_error(error))
        headers = headers_of(run, dialect)
        failure.headers = {**headers, **failure.headers}
        return error_response(failure, dialect, request_id)
    finally:
        if not handed_over:
            watch.cancel()
            service.spawn(run.settle())


async def _whole_answer(service: Service, call: Call, dialect: Dialect, pieces: list[Piece]) -> bytes:
    model = service.model_of(call.model)
    # Vectors, and tokens of a long text, have too many values for the event loop.
    size = num_values(pieces) if call.purpose == "answer" else MAX_ON_LOOP + 1
    return await _written(service, call, lambda: dumps(dialect.answer(call, model, pieces)), size)


async def _written(service: Service, call: Call, write: Callable[[], bytes], size: int) -> bytes:
    """Return `write()`, which writes `size` values: in a thread if they are many, so that other streams continue."""
    return write() if size <= MAX_ON_LOOP else await service.in_thread(write, call.caller.tenant)


async def _first_pieces(run: CallRun, seconds: float) -> list[Piece]:
    """Return the first pieces, up to the first token: errors until then get their own status code.

    After `seconds` of silence return the pieces so far; the stream then begins with a comment.
    """
    pieces: list[Piece] = []
    began = time.perf_counter()
    while not run.has_first_token and time.perf_counter() - began < seconds:
        fresh = await run.next()
        if fresh is None:
            break
        pieces += fresh
    return pieces


async def _watch(request: Request, run: CallRun) -> None:
    """End the run when the client disconnects. The body was read, so the next message is the disconnect."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            run.leave()
            return


def headers_of(run: CallRun, dialect: Dialect) -> dict[str, str]:
    name = run.call.id
    limits = {} if run.lease is None else run.lease.headers
    return {**limits, "x-request-id": name, dialect.request_id_header: name, **ignored_header(run.call.ignored)}


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Return the response header that lists ignored fields, as many as fit; their names come from the client."""
    listed = ", ".join(re.sub(r"[^!-+\--~]+", "_", each) for each in names)
    return {IGNORED_HEADER: listed[:MAX_HEADER]} if listed else {}


class AnswerStream(Response):
    """A streamed answer: bytes as they come, a comment during long silence, and a final event for an error.

    A slow client delays only its own stream: sending waits for the client, the engine does not.
    """

    def __init__(
        self,
        service: Service,
        run: CallRun,
        dialect: Dialect,
        first: list[Piece],
        watch: asyncio.Task[None],
    ):
        super().__init__(status_code=200, headers={**EVENT_STREAM, **headers_of(run, dialect)})
        self.raw_headers = [each for each in self.raw_headers if each[0] != b"content-length"]
        self._run, self._dialect, self._first, self._watch = run, dialect, first, watch
        self._service = service
        self._writer = dialect.writer(run.call, service.model_of(run.call.model))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._run
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._stream(send)
            if not run.has_left:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watch.cancel()
            run.leave()
            self._service.spawn(run.settle())

    async def _stream(self, send: Send) -> None:
        run = self._run
        try:
            body = await self._write(self._first)
            await self._send(send, body or self._dialect.ping)
            while (pieces := await run.next()) is not None:
                body = await self._write(pieces) if pieces else b""
                if run.is_complete:  # accounts are written before the client sees the end
                    await run.settle()
                if not body and time.perf_counter() - run.silent_since > self._service.settings.ping_seconds:
                    body = self._dialect.ping
                if body:
                    await self._send(send, body)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # any error: the stream ends with an error event
            run.fail(failure := as_api_error(error))
            await self._send(send, self._dialect.error_event(failure, run.call.id))

    async def _write(self, pieces: Sequence[Piece]) -> bytes:
        return await _written(self._service, self._run.call, lambda: self._writer.write(pieces), num_values(pieces))

    async def _send(self, send: Send, body: bytes) -> None:
        run = self._run
        await send({"type": "http.response.body", "body": body, "more_body": True})
        run.silent_since = time.perf_counter()
