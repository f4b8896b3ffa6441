"""Read the JSON object of a request, within bounds of size and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from workbench.serve.errors import ApiError
from workbench.serve.json_bytes import loads

if TYPE_CHECKING:
    from fastapi import Request


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, ignoring its content type.

    Raises:
        ApiError: invalid_request_error for a body that is no JSON object.
    """
    try:
        found = loads(body)
    except ValueError as error:
        raise ApiError("invalid_request_error", f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError("invalid_request_error", f"the body is a {type(found).__name__}; it must be an object")
    return found


async def read_json_body(request: Request, max_bytes: int, seconds: float) -> dict[str, Any]:
    """Return the JSON object of a request's body (ApiError as `read_bytes` and `parse_json_object`)."""
    return parse_json_object(await read_bytes(request, max_bytes, seconds))


async def read_bytes(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return a request's body.

    Raises:
        ApiError: request_too_large over `max_bytes`, timeout_error after `seconds`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except TimeoutError:
        headers = {"connection": "close"}
        raise ApiError("timeout_error", f"the body did not arrive within {seconds:g} s", headers=headers) from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    headers = {"connection": "close"}  # the rest of the body is not read
    return ApiError("request_too_large", f"the body has more than {max_bytes:,} bytes", headers=headers)
