"""Read the body of a batch of messages one request at a time.

Python's JSON parser holds the interpreter lock during a call. Parsing one request per call keeps the event loop running
while another thread reads a body of many megabytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from workbench.serve.batches.batch_requests import BatchItem
from workbench.serve.bodies.fields import Body, IgnoredFields, read_body
from workbench.serve.bodies.parts import Part
from workbench.serve.dialects.anthropic.body import NO_PROFILES
from workbench.serve.errors import ApiError

MAX_REQUESTS = 10_000
BLANKS = re.compile(r"[ \t\r\n]*")
REQUESTS = "requests"


class MessageRequest(Part):
    """One message of a batch; its params are checked when it runs."""

    custom_id: Annotated[str, Field(min_length=1, max_length=64)]
    params: dict[str, Any]


class MessageBatchBody(Body):
    requests: Annotated[list[MessageRequest], Field(min_length=1, max_length=MAX_REQUESTS)]

    IGNORED: ClassVar[Mapping[str, str]] = {"user_profile_id": NO_PROFILES, "workspace_id": NO_PROFILES}


def read_requests(content: bytes, path: str, ignored: IgnoredFields | None = None) -> Iterator[BatchItem]:
    """Yield the requests of a body as items for the route `path`. Fields without effect go into `ignored`; without it,
    unknown fields are refused.

    Raises:
        ApiError: for a body that is not a `MessageBatchBody`, or two requests with the same custom_id.
    """
    ignored = IgnoredFields(is_strict=True) if ignored is None else ignored
    others: dict[str, Any] = {}
    names: set[str] = set()
    for name, index, value in _members(content):
        if index is None:
            others[name] = value
            continue
        if index >= MAX_REQUESTS:
            raise ApiError("invalid_request_error", f"requests: has more than {MAX_REQUESTS:,}", REQUESTS)
        found = _read_request(index, value, ignored)
        if found.custom_id in names:
            words = f"requests: two have the custom_id {found.custom_id[:80]!r}; custom_id must be unique"
            raise ApiError("invalid_request_error", words, REQUESTS)
        names.add(found.custom_id)
        yield BatchItem(found.custom_id, path, found.params)
    if names:  # check the other fields as in a request
        others[REQUESTS] = [{"custom_id": "any", "params": {}}]
    ignored.add_all(read_body(MessageBatchBody, others, ignored.is_strict)[1])


def _read_request(index: int, value: Any, ignored: IgnoredFields) -> MessageRequest:
    try:
        body, more = read_body(MessageBatchBody, {REQUESTS: [value]}, ignored.is_strict)
        ignored.add_all(more)
        return body.requests[0]
    except ApiError as error:
        here, place = f"{REQUESTS}.0", f"{REQUESTS}.{index}"
        words, param = error.message.replace(here, place, 1), error.param.replace(here, place, 1)
        raise ApiError(error.kind, words, param, error.code) from None


def _members(content: bytes) -> Iterator[tuple[str, int | None, Any]]:
    """Yield the members of a JSON object as (name, None, value), elements of `requests` as (name, index, value)."""
    try:
        text = content.decode()
        yield from _Members(text)
    except RecursionError:
        raise ApiError("invalid_request_error", "the body is nested too deep") from None
    except ValueError as error:
        raise ApiError("invalid_request_error", f"the body is not a JSON object: {error}") from None


class _Members:
    """A walk over the text of a JSON object. Raises ValueError for invalid JSON."""

    def __init__(self, text: str):
        self._text, self._at = text, 0
        self._decoder = json.JSONDecoder(parse_constant=_refuse_constant)

    def __iter__(self) -> Iterator[tuple[str, int | None, Any]]:
        names: set[str] = set()
        self._expect("{")
        while not self._takes("}"):
            if names:
                self._expect(",")
            name = self._value()
            if not isinstance(name, str) or name in names:
                raise ValueError(f"the name {name!r:.80} is not a text, or is given twice")
            names.add(name)
            self._expect(":")
            if name == REQUESTS and self._takes("["):
                yield from self._elements(name)
            else:
                yield name, None, self._value()
        if self._at < len(self._text):
            raise ValueError(f"characters after the end, at {self._at:,}")

    def _elements(self, name: str) -> Iterator[tuple[str, int | None, Any]]:
        index = 0
        while not self._takes("]"):
            if index:
                self._expect(",")
            yield name, index, self._value()
            index += 1
        if not index:
            yield name, None, []

    def _value(self) -> Any:
        value, end = self._decoder.raw_decode(self._text, self._at)
        self._skip(end)
        return value

    def _takes(self, mark: str) -> bool:
        if not self._at:
            self._skip(0)
        found = self._text.startswith(mark, self._at)
        if found:
            self._skip(self._at + len(mark))
        return found

    def _expect(self, mark: str) -> None:
        if not self._takes(mark):
            raise ValueError(f"expected {mark!r} at character {self._at:,}")

    def _skip(self, at: int) -> None:
        found = BLANKS.match(self._text, at)
        self._at = at if found is None else found.end()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
