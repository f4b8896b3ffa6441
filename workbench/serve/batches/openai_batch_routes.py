"""Serve OpenAI's files and batches: a client uploads a file of requests, a batch runs it, and results are files again.

POST /v1/files -> file-... -> POST /v1/batches -> batch_... -> GET /v1/files/{output_file_id}/content
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from workbench.serve.batches.batch_requests import BatchItem, BatchRequests
from workbench.serve.batches.batch_store import BatchStore
from workbench.serve.batches.batch_work import SECONDS_OF_LIFE, BatchWork, ItemResult
from workbench.serve.batches.lines import read_lines, result_line
from workbench.serve.batches.stored_files import FileStore, FileWriter, StoredFile
from workbench.serve.batches.upload import file_response, mapped, parts_of, read_form, receive_body
from workbench.serve.bodies.fields import Body, IgnoredFields, Refused, read_body
from workbench.serve.bodies.json_body import read_json_body
from workbench.serve.dialects.openai.common import error_json
from workbench.serve.document import describe_body
from workbench.serve.errors import ApiError
from workbench.serve.responses import ignored_header, json_response

if TYPE_CHECKING:
    from workbench.serve.service import Service

MAX_LINES = 50_000
UPLOAD_SECONDS = 600.0
EXPIRED = "batch_expired"


class OpenAIBatchBody(Body):
    """The body of a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "output_expires_after": Refused("results are kept for server.batch_result_seconds"),
    }


class ResultFiles:
    """The two result files of a batch, visible to the tenant once the batch has ended. Empty files are not kept."""

    def __init__(self, store: FileStore, tenant: str, batch_id: str):
        self._writers: dict[str, FileWriter] = {}
        self.files: dict[str, StoredFile] = {}
        try:
            for kind in ("output", "error"):
                self._writers[kind] = store.writer(tenant, f"{batch_id}_{kind}.jsonl", "batch_output")
        except ApiError:
            self.discard()
            raise

    def write(self, kind: str, line: bytes, must: bool) -> None:
        self._writers[kind].write(line, must)

    def finish(self, expires: int) -> None:
        """Keep the files until `expires`; a file that does not fit on the disk is left out."""
        for kind, writer in self._writers.items():
            if writer.file.bytes:
                with suppress(ApiError):
                    self.files[kind] = writer.finish(expires)
        self.discard()

    def discard(self) -> None:
        """Discard unfinished files."""
        for writer in self._writers.values():
            writer.discard()


@dataclass
class OpenAIBatch:
    """A batch: its request, its work, and its result files."""

    id: str
    tenant: str
    asked: OpenAIBatchBody
    model: str | None
    results: ResultFiles
    store: BatchStore
    work: BatchWork = field(init=False)  # set before the batch is added to a store

    def write(self, result: ItemResult, must: bool) -> None:
        """Write a result line; with `must`, even if it exceeds the budget of bytes. A canceled item has no line."""
        if result.ending == "canceled":
            return
        answer, expired = None, None
        if result.error is not None:
            answer = error_json(result.error)
        elif result.answer is not None:
            answer = 200, result.answer
        else:  # it never ran, so there is no response
            expired = {"code": EXPIRED, "message": "the batch expired before this request was run"}
        kind = "output" if result.answer is not None else "error"
        self.results.write(kind, result_line(secrets.token_hex(12), result.custom_id, answer, expired), must)

    async def finish(self) -> None:
        """Make files of the results; they expire when the batch does."""
        expires = int(time.time() + self.store.seconds)
        await self.store.in_thread(lambda: self.results.finish(expires))

    def discard(self) -> None:
        """Do nothing: result files have their own expiry."""

    def as_json(self) -> dict[str, Any]:
        work = self.work
        counts, ended = work.counts, None if work.ended_at is None else int(work.ended_at)
        canceled = None if work.canceled_at is None else int(work.canceled_at)
        status = "in_progress"
        if canceled is not None:
            status = "cancelled" if work.has_ended else "cancelling"
        elif work.has_ended:
            status = "expired" if counts["expired"] else "completed"
        total, tokens = sum(counts.values()), work.tokens
        created = int(work.created)
        return {
            "id": self.id, "object": "batch", "endpoint": self.asked.endpoint, "errors": None,
            "input_file_id": self.asked.input_file_id, "completion_window": "24h", "status": status,
            "output_file_id": self._file("output"), "error_file_id": self._file("error"), "model": self.model,
            "created_at": created, "in_progress_at": created, "expires_at": created + int(SECONDS_OF_LIFE),
            "finalizing_at": ended, "completed_at": ended if status == "completed" else None, "failed_at": None,
            "expired_at": ended if status == "expired" else None, "cancelling_at": canceled,
            "cancelled_at": ended if status == "cancelled" else None, "metadata": self.asked.metadata,
            "request_counts": {
                "total": total, "completed": counts["succeeded"], "failed": counts["errored"] + counts["expired"],
            },
            "usage": {
                "input_tokens": tokens["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": tokens["cached_tokens"]},
                "output_tokens": tokens["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": tokens["thinking_tokens"]},
                "total_tokens": tokens["prompt_tokens"] + tokens["completion_tokens"],
            },
        }  # fmt: skip

    def _file(self, kind: str) -> str | None:
        return self.results.files[kind].id if kind in self.results.files else None


def openai_batch_routes(service: Service, store: BatchStore) -> APIRouter:
    """Return the routes of files and batches; both belong to the tenant that created them."""
    router = APIRouter()
    files = store.files

    async def tenant(request: Request) -> str:
        return (await service.identify(request)).tenant

    async def batch_of(request: Request, id: str) -> OpenAIBatch:
        found = store.get(OpenAIBatch, await tenant(request), id)
        if found is None:
            raise ApiError("not_found_error", f"batch_id: no batch {id[:80]!r}", "batch_id", "batch_not_found")
        return found

    @router.post("/v1/files", summary="Upload a file of requests, as a form of purpose and file")
    async def upload(request: Request) -> Response:
        owner = await tenant(request)
        body = await receive_body(request, files, owner, service.settings.max_upload_bytes, UPLOAD_SECONDS)
        content_type = request.headers.get("content-type", "")
        try:
            is_strict = service.settings.refuses_unknown
            kept = await store.in_thread(lambda: add_upload(files, body, content_type, is_strict))
            return json_response(200, kept.as_json())
        finally:
            body.discard()

    @router.get("/v1/files", summary="List the files")
    async def list_files(request: Request, purpose: str = "", limit: int = 100, after: str = "") -> Response:
        mine = [each for each in files.list(await tenant(request)) if purpose in ("", each.purpose)]
        return json_response(200, page([each.as_json() for each in reversed(mine)], limit, after))

    @router.get("/v1/files/{file_id}", summary="Return what is known of a file")
    async def retrieve_file(file_id: str, request: Request) -> Response:
        return json_response(200, files.get(await tenant(request), file_id).as_json())

    @router.get("/v1/files/{file_id}/content", summary="Return a file's content")
    async def content(file_id: str, request: Request) -> Response:
        found = files.get(await tenant(request), file_id)
        return file_response(files.path(found), "application/octet-stream")

    @router.delete("/v1/files/{file_id}", summary="Delete a file")
    async def delete_file(file_id: str, request: Request) -> Response:
        files.remove(files.get(await tenant(request), file_id))
        return json_response(200, {"id": file_id, "object": "file", "deleted": True})

    @router.post("/v1/batches", summary="Run a file of requests", openapi_extra=describe_body(OpenAIBatchBody))
    async def create(request: Request) -> Response:
        caller = await service.identify(request)
        settings = service.settings
        given = await read_json_body(request, settings.max_body_bytes, settings.body_seconds)
        asked, ignored = read_body(OpenAIBatchBody, given, settings.refuses_unknown)
        paths = [each.path for each in service.dialects.values() if each.name.startswith("openai.")]
        if asked.endpoint not in paths:
            words = f"endpoint: {asked.endpoint[:80]!r} is not answered here; known: {', '.join(paths)}"
            raise ApiError("invalid_request_error", words, "endpoint")
        source = files.get(caller.tenant, asked.input_file_id, "input_file_id")
        lines = files.path(source).open("rb")  # before another request can delete it
        models: set[str] = set()

        def read() -> BatchRequests:
            items = read_items(lines, asked.endpoint, models, ignored)
            return BatchRequests.write(files, caller.tenant, items, settings.max_body_bytes)

        id = f"batch_{secrets.token_hex(12)}"
        with lines:
            results = ResultFiles(files, caller.tenant, id)
            try:
                requests = await store.read_requests(caller.tenant, read)
            except BaseException:
                results.discard()
                raise
        found = OpenAIBatch(id, caller.tenant, asked, min(models, default=None), results, store)
        found.work = BatchWork(service, store.slots, caller, requests, found.write, found.finish)
        store.add(found)
        return json_response(200, found.as_json(), ignored_header(ignored))

    @router.get("/v1/batches", summary="List the batches")
    async def list_batches(request: Request, limit: int = 20, after: str = "") -> Response:
        owner = await tenant(request)
        mine = [each.as_json() for each in store.list(OpenAIBatch, owner)]
        return json_response(200, page(mine, limit, after))

    @router.get("/v1/batches/{batch_id}", summary="Return a batch")
    async def retrieve(batch_id: str, request: Request) -> Response:
        return json_response(200, (await batch_of(request, batch_id)).as_json())

    @router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch; what has ended keeps its results")
    async def cancel(batch_id: str, request: Request) -> Response:
        found = await batch_of(request, batch_id)
        found.work.cancel()
        return json_response(200, found.as_json())

    return router


def add_upload(files: FileStore, body: FileWriter, content_type: str, is_strict: bool = True) -> StoredFile:
    """Store the file of an uploaded form, and return it. Raise ApiError for a form without a file, and for unsupported
    fields: the file's expiry, and with `is_strict` all unknown fields.
    """
    with mapped(body.path) as content:
        fields = read_form(content, content_type)
        if "file" not in fields:
            raise ApiError("invalid_request_error", "file: is missing; send it as a part of the form", "file")
        for name in fields:
            if name not in ("file", "purpose") and (is_strict or name.startswith("expires_after")):
                words = f"{name[:80]}: is not supported; files are kept until they are deleted"
                raise ApiError("invalid_request_error", words, name[:80])
        given = b"".join(parts_of(content, fields["purpose"])) if "purpose" in fields else b""
        purpose = given.decode("utf-8", "replace")
        if purpose != "batch":
            raise ApiError("invalid_request_error", f"purpose: {purpose[:50]!r} is not supported; use batch", "purpose")
        body.discard()  # its bytes no longer count, but stay readable while mapped
        name = fields["file"].filename[:256]
        return files.add(body.file.tenant, name, "batch", parts_of(content, fields["file"]))


def read_items(
    lines: Iterable[bytes], endpoint: str, models: set[str], ignored: IgnoredFields | None = None
) -> Iterator[BatchItem]:
    """Yield the requests in the lines of a file, and add their models to `models`; an invalid line has an error.
    Unknown fields of a line go into `ignored`; without it they make the line invalid.

    Raises:
        ApiError: for no line, or too many lines.
    """
    number = 0
    known = IgnoredFields(is_strict=True) if ignored is None else ignored
    for number, item in enumerate(read_lines(lines, [endpoint], known), 1):
        if number > MAX_LINES:
            break
        if isinstance(model := item.body.get("model"), str):
            models.add(model)
        yield item
    if not 1 <= number <= MAX_LINES:
        found = f"more than {MAX_LINES:,}" if number else "no"
        words = f"input_file_id: the file has {found} lines; a batch has 1 to {MAX_LINES:,}"
        raise ApiError("invalid_request_error", words, "input_file_id")


def page(listed: list[dict[str, Any]], limit: int, after: str, before: str = "") -> dict[str, Any]:
    """Return a page of a list: the items after or before the item with a given id (ApiError for an unknown id or a
    wrong limit).
    """
    if after and before:
        raise ApiError("invalid_request_error", "before_id: give after_id or before_id, not both", "before_id")
    if before:
        found = page(listed[::-1], limit, before)
        return {**found, "data": found["data"][::-1], "first_id": found["last_id"], "last_id": found["first_id"]}
    if not 1 <= limit <= 10_000:
        raise ApiError("invalid_request_error", f"limit: {limit} is not from 1 to 10,000", "limit")
    if after:
        place = next((n for n, each in enumerate(listed) if each["id"] == after), None)
        if place is None:
            raise ApiError("invalid_request_error", f"after: no item {after[:80]!r}", "after")
        listed = listed[place + 1 :]
    shown = listed[:limit]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, "has_more": len(listed) > limit, **ends}
