"""Serve scripted pieces through a dialect to a vendor's own client, without a server or an engine."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace, UnionType
from typing import Any

import anthropic
import httpx2
import openai
import orjson
import pytest
from anthropic import types

from tests.serve.serving import Json
from workbench.serve.answers.pieces import (
    Ended,
    Piece,
    PromptRead,
    Text,
    Thought,
    ToolArguments,
    ToolCallBegun,
    Used,
)
from workbench.serve.bodies.fields import invalid, read_body
from workbench.serve.call import Call, Caller
from workbench.serve.dialects.anthropic.messages import AnthropicMessages
from workbench.serve.errors import ApiError

THINKING_MODEL: Any = SimpleNamespace(name="tiny", can_think=True, max_model_len=512, created=1_700_000_000)
PLAIN_MODEL: Any = SimpleNamespace(name="tiny", can_think=False, max_model_len=512, created=1_700_000_000)


def first_letter_changed(text: str) -> str:
    """Return a text whose first letter, which may be any, is another."""
    return ("y" if text.startswith("x") else "x") + text[1:]


class Script:
    """Answers every request by `pieces`; keeps the calls that the dialect made of the bodies.

    `steps` pieces are written at a time, as an engine's steps bring them.
    """

    def __init__(
        self, dialect: Any, pieces: Sequence[Piece] | Callable[[Call], Sequence[Piece]] = (), model: Any = PLAIN_MODEL,
        notes: Json | None = None, steps: int = 1, fails: ApiError | None = None,
    ):  # fmt: skip
        self.dialect, self.model, self.steps, self.fails = dialect, model, steps, fails
        self.pieces, self.notes, self.calls = pieces, notes or {}, []
        self.bodies: list[Json] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        body = orjson.loads(request.content)
        self.bodies.append(body)
        try:
            parsed, ignored = read_body(self.dialect.body, body)
            call = self.dialect.parse(parsed, self.model, ignored, Caller(tenant=request.headers.get("x-tenant", "")))
        except ValueError as error:
            status, values = self.dialect.error(invalid(error), "req_1")
            return httpx2.Response(status, json=values)
        self.calls.append(call)
        call = replace(call, notes={**call.notes, **self.notes})
        pieces = list(self.pieces(call) if callable(self.pieces) else self.pieces)
        if not call.stream:
            return httpx2.Response(200, json=self.dialect.answer(call, self.model, pieces))
        content = b"".join(self._events(call, pieces))
        return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})

    def _events(self, call: Call, pieces: list[Piece]) -> Iterator[bytes]:
        writer = self.dialect.writer(call, self.model)
        for first in range(0, len(pieces), self.steps):
            yield writer.write(pieces[first : first + self.steps])
        if self.fails is not None:
            yield self.dialect.ping
            yield self.dialect.error_event(self.fails, call.id)

    def anthropic(self) -> anthropic.Anthropic:
        http = anthropic.DefaultHttpxClient(transport=httpx2.MockTransport(self))
        return anthropic.Anthropic(api_key="k", base_url="http://server", http_client=http, max_retries=0)

    def openai(self) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(transport=httpx2.MockTransport(self))
        return openai.OpenAI(api_key="k", base_url="http://server/v1", http_client=http, max_retries=0)

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL: Any = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
EPHEMERAL: Any = {"type": "ephemeral"}
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
READ = PromptRead(prompt_tokens=10, cached_tokens=4, written_tokens=3, cache_written_by_ttl=((300.0, 1), (3600.0, 2)))
USED = Used(
    prompt_tokens=10, completion_tokens=9, cached_tokens=4, written_tokens=3, thinking_tokens=2,
    cache_written_by_ttl=((300.0, 1), (3600.0, 2)),
)  # fmt: skip
WHOLE: list[Piece] = [
    READ,
    Thought(text="hm "),
    Thought(text="ok"),
    Text(text="Hel"),
    Text(text="lo"),
    ToolCallBegun(index=0, id="toolu_1", name="add"),
    ToolArguments(index=0, text='{"a":'),
    ToolArguments(index=0, text=" 1}"),
    ToolCallBegun(index=1, id="toolu_2", name="now"),
    Ended(reason="tool_calls"),
    USED,
]


def ask(script: Script, **values: Any) -> types.Message:
    return script.anthropic().messages.create(**{"model": "tiny", "max_tokens": 50, "messages": HI, **values})


def refused(**values: Any) -> tuple[str, str]:
    """Return the message of a refusal, and the parameter that it names first."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(Script(AnthropicMessages(), [READ, Ended(), USED], THINKING_MODEL), **values)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and body["request_id"]
    return body["error"]["message"], body["error"]["message"].split(":")[0]


def literal_of(kind: Any, field: str) -> str:
    """Return the first of the texts that a vendor's type allows for a field."""
    hint = typing.get_type_hints(kind)[field]
    while typing.get_origin(hint) is not typing.Literal:
        assert typing.get_origin(hint) in (typing.Union, UnionType), hint
        hint = typing.get_args(hint)[0]
    return typing.get_args(hint)[0]
