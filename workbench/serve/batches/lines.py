"""Read and write the lines of OpenAI's batch files, for `/v1/batches` and `workbench batch`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from workbench.errors import nearest
from workbench.files import UnreadableText, read_json
from workbench.serve.batches.batch_requests import BatchItem
from workbench.serve.bodies.fields import IgnoredFields
from workbench.serve.call import Call
from workbench.serve.errors import ApiError, invalid_field

LINE_KEYS = ("custom_id", "method", "url", "body")


def read_lines(lines: Iterable[bytes], paths: Collection[str], ignored: IgnoredFields) -> Iterator[BatchItem]:
    """Yield the requests in the non-blank lines of a file; an invalid line has an error.

    Args:
        lines: lines of the file.
        paths: routes that a line may name.
        ignored: receives unknown fields of the lines; if it is strict, they make a line invalid.
    """
    names: dict[str, int] = {}
    for number, line in enumerate(filter(None, map(bytes.strip, lines)), 1):
        name = f"line {number}"
        try:
            given = read_json_line(line)
            if isinstance(given.get("custom_id"), str):
                name = given["custom_id"] or name
            url, body = _read_request(ignored.check(given, LINE_KEYS, "line"), paths)
            if (first := names.setdefault(name, number)) != number:
                raise _invalid(f"custom_id: {name[:80]!r} is also the custom_id of line {first}")
        except ApiError as error:
            error = ApiError(error.kind, f"line {number}: {error.message}", code=error.code)
            yield BatchItem(name, "", {}, error)
        else:
            yield BatchItem(name, url, body)


def read_json_line(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line; ApiError if the line is not a JSON object."""
    try:
        found = read_json(line)
    except UnreadableText as error:
        raise _invalid(error.reason, "invalid_json") from None
    if not isinstance(found, dict):
        words = f"must be an object with {', '.join(LINE_KEYS)}, not {type(found).__name__}"
        raise _invalid(words, "invalid_json")
    return found


def _read_request(line: Mapping[str, Any], paths: Collection[str]) -> tuple[str, dict[str, Any]]:
    name, url, body = line.get("custom_id"), line.get("url"), line.get("body")
    if not isinstance(name, str) or not name:
        raise _invalid(f"custom_id: must be a text that names the line, not {name!r}")
    if line.get("method") != "POST":
        raise _invalid(f"method: must be 'POST', not {line.get('method')!r}")
    if not isinstance(url, str) or url not in paths:
        hint = nearest(str(url), paths) or f"; known: {', '.join(paths)}"
        raise _invalid(f"url: {url!r} is not answered here{hint}")
    if not isinstance(body, dict):
        raise _invalid(f"body: must be an object, not {type(body).__name__}")
    return url, body


def _invalid(words: str, code: str = "invalid_request") -> ApiError:
    return ApiError("invalid_request_error", words, code=code)


def check_whole(call: Call) -> None:
    """Raise ApiError if the call of a line asks for a streamed answer."""
    if call.stream:
        raise invalid_field("stream", "a batch does not stream; leave stream out")


def result_line(
    line_id: str, custom_id: str, answer: tuple[int, Mapping[str, Any]] | None, error: dict[str, str] | None = None
) -> bytes:
    """Return a result line: status and body of an answer or refusal, or an error if there is no answer."""
    response = None
    if answer is not None:
        response = {"status_code": answer[0], "request_id": f"req_{line_id}", "body": answer[1]}
    whole = {"id": f"batch_req_{line_id}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(whole).encode() + b"\n"
