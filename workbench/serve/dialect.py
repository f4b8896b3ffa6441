"""Define a dialect: how one protocol's bodies become calls, and pieces of answers become its JSON and its events.

A dialect holds no engine: the server (`app.py`) does what all of them need. Large answers are written, and large
bodies parsed, in other threads than the event loop's. The server reads the body's bytes,
finds the model, calls `parse`, asks the gate, runs the call, and writes what comes:

    streamed   the bytes that `writer(...).write(pieces)` returns, for each list of pieces, from the first token on
    plain      `answer(call, model, pieces)`, with all pieces of the answer
    refused    `error(...)` as the response, or `error_event(...)` where the stream has begun; nothing follows it

To add one: a module below `workbench/serve/dialects` with a class of this shape, and its name in that package's
`DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from workbench.serve.answers.pieces import Piece
from workbench.serve.bodies.fields import Body, IgnoredFields
from workbench.serve.call import Call, Caller
from workbench.serve.errors import ApiError

if TYPE_CHECKING:
    from fastapi import APIRouter, Request

    from workbench.serve.served_model import ServedModel

PING = b": ping\n\n"  # a comment, which every client skips


class AnswerWriter(Protocol):
    """The writer of one streamed answer. It may keep state: counters, and the block that is open."""

    def write(self, pieces: Sequence[Piece]) -> bytes:
        """Return the events of these pieces, ready to be sent; the end of the stream with `Used`, the last piece.

        `Failed` never comes here. Bytes are empty where the pieces say nothing yet.
        """
        ...


class RouteServices(Protocol):
    """The server as a route of a dialect's own sees it (`service.Service`)."""

    models: dict[str, ServedModel]
    dialects: Mapping[str, Dialect]  # by name

    async def identify(self, request: Request) -> Caller:
        """Return who asks, known to the gate (ApiError)."""
        ...

    async def read(self, request: Request, dialect: Dialect) -> Call:
        """Return the validated call of a request, with its caller; not admitted yet (ApiError)."""
        ...

    def parse(self, given: Mapping[str, Any], dialect: Dialect, caller: Caller) -> Call:
        """Return the call of a body that came within another (a line of a batch), not admitted yet (ApiError)."""
        ...

    async def run(self, call: Call) -> list[Piece]:
        """Return all pieces of a call that no client waits for, from the gate's door to its settlement (ApiError).

        Cancelled, it cancels the call.
        """
        ...

    def model_for(self, caller: Caller, name: str | None) -> ServedModel:
        """Return a model that the caller may use, the first such one for no name (ApiError)."""
        ...


class Dialect(Protocol):
    """A protocol's way to say calls, answers and errors.

    Attributes:
        name: as in `Call.dialect`.
        path: of its route, a POST.
        body: the fields of its body, which are validated before `parse` and shown in the OpenAPI document.
        ping: what is sent while nothing else is.
        request_id_header: the header of a response that carries the call's id.
        answer_schema: the JSON Schema of what `answer` returns, for the OpenAPI document.
        error_schema: that of what `error` returns.
    """

    name: str
    path: str
    body: type[Body]
    ping: bytes
    request_id_header: str
    answer_schema: dict[str, Any]
    error_schema: dict[str, Any]

    def parse(self, body: Any, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        """Return the call that a validated body asks for.

        Args:
            body: a value of the class `body`.
            model: the model that the body names.
            ignored: fields without effect, and why; they belong into the call.
            caller: who asks; the server puts it into the call.

        Raises:
            ApiError: invalid_request_error with `param`, for what no single field can tell. A WorkbenchError (of a
                conversation, say) and a pydantic ValidationError become one.
        """
        ...

    def writer(self, call: Call, model: ServedModel) -> AnswerWriter: ...

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the JSON of a whole answer."""
        ...

    def error(self, error: ApiError, request_id: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an error. The error's headers are sent by the server."""
        ...

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        """Return the event that ends a stream which has begun."""
        ...

    def routes(self, services: RouteServices) -> Iterable[APIRouter]:
        """Return further routes of the protocol (stored answers); their callers are known to the gate too.

        An ApiError raised in a route is written by the dialect whose `path` the route's path begins with.
        """
        ...

    def tokenizers(self) -> Iterable[Dialect]:
        """Return dialects whose calls have the purpose tokenize: they count a prompt as this one would read it."""
        ...
