"""Serve scripted pieces through a dialect to a vendor's own client, without a server or an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import openai
import orjson

from workbench.serve.answers.pieces import Piece
from workbench.serve.bodies.fields import invalid, read_body
from workbench.serve.call import Call, Caller
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
        notes: dict[str, Any] | None = None, steps: int = 1, fails: ApiError | None = None,
    ):  # fmt: skip
        self.dialect, self.model, self.steps, self.fails = dialect, model, steps, fails
        self.pieces, self.notes, self.calls = pieces, notes or {}, []
        self.bodies: list[dict[str, Any]] = []

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
