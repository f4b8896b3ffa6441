"""Receive large bodies into files and send files, in parts; find the fields of a multipart form."""

from __future__ import annotations

import asyncio
import io
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response, StreamingResponse

from workbench.serve.batches.stored_files import FileStore, FileWriter
from workbench.serve.errors import ApiError

if TYPE_CHECKING:
    from fastapi import Request

MAX_FIELDS = 16
MAX_HEAD_BYTES = 8192  # maximum bytes of a field's headers
MAX_BOUNDARY = 70  # characters (RFC 2046)
PARAMETER = re.compile(r';\s*([\w*-]+)=("(?:[^"\\]|\\.)*"|[^;\s]*)')
PART_BYTES = 1 << 20  # copied at once


@dataclass(frozen=True)
class UploadField:
    """A field of a form: the name of its file (empty for a plain value), and the range of its bytes."""

    filename: str
    start: int
    stop: int


async def receive_body(request: Request, store: FileStore, tenant: str, max_bytes: int, seconds: float) -> FileWriter:
    """Write a request's body to a file that counts against the tenant's budget; the caller discards it.

    Raises:
        ApiError: request_too_large over `max_bytes`, timeout_error after `seconds`, and as `FileWriter.write`.
    """
    words = f"the body has more than {max_bytes:,} bytes; send it in parts"
    declared = request.headers.get("content-length", "")
    writer = store.writer(tenant, "", "upload")
    try:
        if declared.isdigit() and int(declared) > max_bytes:
            raise ApiError("request_too_large", words)
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                if writer.file.bytes + len(part) > max_bytes:
                    raise ApiError("request_too_large", words)
                if part:
                    writer.write(part)
        return writer
    except BaseException as error:
        writer.discard()
        if isinstance(error, TimeoutError):
            raise ApiError("timeout_error", f"the body did not arrive within {seconds:g} s") from None
        if isinstance(error, ApiError):
            error.headers["connection"] = "close"  # the rest of the body is not read
        raise


@contextmanager
def mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    """Map a file into memory within the block; its bytes are read on access."""
    if not path.exists() or not path.stat().st_size:
        yield b""
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as found:
        yield found


def parts_of(body: bytes | mmap.mmap, field: UploadField) -> Iterator[bytes]:
    """Yield a field's bytes in parts."""
    for start in range(field.start, field.stop, PART_BYTES):
        yield body[start : min(start + PART_BYTES, field.stop)]


def read_form(body: bytes | mmap.mmap, content_type: str) -> dict[str, UploadField]:
    """Return the fields of a multipart form by name.

    Raises:
        ApiError: for a body that is no such form, is cut off, names a field twice, or has too many or too long headers.
    """
    kind = content_type.partition(";")[0].strip().lower()
    boundary = _parameters(content_type).get("boundary", "")
    if kind != "multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY or not boundary.isascii():
        raise ApiError("invalid_request_error", "the body must be multipart/form-data with file and purpose", "file")
    mark = b"--" + boundary.encode()
    at = 0 if body[: len(mark)] == mark else body.find(b"\r\n" + mark) + 2
    if at == 1:
        raise _malformed("the boundary that content-type names is not in it")
    fields: dict[str, UploadField] = {}
    while True:
        at += len(mark)
        if body[at : at + 2] == b"--":
            return fields
        end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        if end < 0:
            raise _malformed(f"a part has no end of its headers within {MAX_HEAD_BYTES:,} bytes")
        stop = body.find(b"\r\n" + mark, end + 4)
        if stop < 0:
            raise _malformed("it is cut off; its last boundary is missing")
        lines = body[at:end].decode("utf-8", "replace").split("\r\n")
        described = next((line for line in lines if line.lower().startswith("content-disposition:")), "")
        values = _parameters(described)
        if "name" in values:
            name = values["name"]
            if name in fields:
                raise ApiError("invalid_request_error", f"{name[:80]}: is given twice in the form", name[:80])
            if len(fields) == MAX_FIELDS:
                raise _malformed(f"it has more than {MAX_FIELDS} fields")
            fields[name] = UploadField(values.get("filename", ""), end + 4, stop)
        at = stop + 2


def _parameters(header: str) -> dict[str, str]:
    found = PARAMETER.findall(header)
    return {name.lower(): value.strip('"').replace('\\"', '"') for name, value in found}


def _malformed(why: str) -> ApiError:
    return ApiError("invalid_request_error", f"the form cannot be read: {why}", "file")


def file_response(path: Path, media_type: str) -> Response:
    """Return a response that reads the file while sending it; the file may be deleted meanwhile."""
    file = path.open("rb") if path.exists() else io.BytesIO()
    size = os.fstat(file.fileno()).st_size if isinstance(file, io.BufferedReader) else 0

    def read() -> Iterator[bytes]:
        with file:
            while part := file.read(PART_BYTES):
                yield part

    return StreamingResponse(read(), media_type=media_type, headers={"content-length": str(size)})
