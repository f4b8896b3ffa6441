"""Define a dialect: it converts one protocol's bodies to calls, and pieces of answers to its JSON and its events.

A dialect holds no engine: the server (`app.py`) does the common work. Large answers are written, and large bodies
parsed, outside of the event loop's thread. The server reads the body's bytes, finds the model, calls `parse`, asks the
gate, runs the call, and writes:

    streamed   the bytes that `writer(...).write(pieces)` returns, for each list of pieces, from the first token on
    plain      `answer(call, model, pieces)`, with all pieces of the answer
    refused    `error(...)` as the response, or `error_event(...)` if the stream has begun; nothing follows it

To add one: a module below `workbench/serve/dialects` with a class of this shape, and its name in that package's
`DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from workbench.errors import WorkbenchError
from workbench.serve.answers.pieces import Piece
from workbench.serve.bodies.fields import Body, IgnoredFields, invalid, read_body
from workbench.serve.call import Call, Caller
from workbench.serve.config import ServerSettings
from workbench.serve.errors import ApiError, invalid_field

if TYPE_CHECKING:
    from fastapi import APIRouter, Request

    from workbench.serve.served_model import ServedModel

PING = b": ping\n\n"  # a comment, which every client skips


class AnswerWriter(Protocol):
    """The writer of one streamed answer. It may keep state, such as counters and the open block."""

    def write(self, pieces: Sequence[Piece]) -> bytes:
        """Return the events of `pieces` as bytes. After `Used`, the last piece of an answer, they include the end of
        the stream.

        `Failed` is never passed. The result is empty if the pieces give no event yet.
        """
        ...


class RouteServices(Protocol):
    """The server's interface for a dialect's own routes (`service.Service`)."""

    models: dict[str, ServedModel]
    dialects: Mapping[str, Dialect]  # by name

    async def identify(self, request: Request) -> Caller:
        """Return the caller of a request, as the gate identifies it; ApiError for an invalid key."""
        ...

    async def read(self, request: Request, dialect: Dialect) -> Call:
        """Return the validated call of a request, with its caller. The gate has not admitted it yet. ApiError for an
        invalid request.
        """
        ...

    def parse(self, given: Mapping[str, Any], dialect: Dialect, caller: Caller) -> Call:
        """Return the call of a body that is part of another body (a batch line). The gate has not admitted it yet.
        ApiError for an invalid body.
        """
        ...

    async def run(self, call: Call) -> list[Piece]:
        """Run a call without a waiting client, from admission to settlement, and return all its pieces; ApiError if the
        call is refused or fails.

        Cancelling this coroutine cancels the call.
        """
        ...

    def model_for(self, caller: Caller, name: str | None) -> ServedModel:
        """Return the model `name`, or without a name the first model that the caller may use; ApiError if the caller
        may use none.
        """
        ...


class Dialect(Protocol):
    """A protocol's form of calls, answers and errors.

    Attributes:
        name: as in `Call.dialect`.
        path: path of its POST route.
        body: class of its body, validated before `parse` and shown in the OpenAPI document.
        ping: bytes sent during silence.
        request_id_header: the response header with the call's id.
        answer_schema: JSON Schema of the result of `answer`, for the OpenAPI document.
        error_schema: JSON Schema of the result of `error`.
    """

    name: str
    path: str
    body: type[Body]
    ping: bytes
    request_id_header: str
    answer_schema: dict[str, Any]
    error_schema: dict[str, Any]

    def parse(self, body: Any, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        """Return the call that a validated body requests.

        Args:
            body: a value of the class `body`.
            model: the model that the body names.
            ignored: fields without effect, with reasons; they belong in the call.
            caller: the caller; the server puts it into the call.

        Raises:
            ApiError: invalid_request_error with `param`, for errors that no single field shows. A WorkbenchError (of a
                conversation, for example) or pydantic ValidationError is converted to one.
        """
        ...

    def writer(self, call: Call, model: ServedModel) -> AnswerWriter: ...

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the JSON of a whole answer."""
        ...

    def error(self, error: ApiError, request_id: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an error. The server sends the error's headers."""
        ...

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        """Return the event that ends a started stream."""
        ...

    def routes(self, services: RouteServices) -> Iterable[APIRouter]:
        """Return further routes of the protocol (stored answers); the gate identifies their callers too.

        An ApiError raised in a route is written by the dialect with a `path` that begins the route's path.
        """
        ...

    def tokenizers(self) -> Iterable[Dialect]:
        """Return dialects whose calls have the purpose tokenize: they count the tokens of a prompt as this dialect
        reads it.
        """
        ...


def read_call(
    dialect: Dialect,
    given: Mapping[str, Any],
    find_model: Callable[[], ServedModel],
    settings: ServerSettings,
    caller: Caller,
) -> Call:
    """Return the call of a body, from a request or a batch line; not admitted yet.

    Args:
        dialect: the protocol of the body.
        given: the JSON object of the body.
        find_model: returns the model that answers, once the body is valid.
        settings: limits on bodies.
        caller: the caller.

    Raises:
        ApiError: for a refused body.
    """
    body, ignored = read_body(dialect.body, given, settings.refuses_unknown)
    model = find_model()
    try:
        call = dialect.parse(body, model, ignored, caller)
    except (WorkbenchError, ValidationError) as error:
        raise invalid(error) from None
    if call.purpose == "answer" and call.num_choices > settings.max_choices:
        words = f"{call.num_choices} answers (prompts times n); {settings.max_choices} are allowed"
        raise invalid_field("n", words)
    return replace(call, caller=caller)
