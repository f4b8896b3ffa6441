"""Serve Anthropic's message batches: many messages in one request, with results as JSON lines."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from workbench.serve.batches.batch_requests import BatchRequests
from workbench.serve.batches.batch_store import BatchStore
from workbench.serve.batches.batch_work import SECONDS_OF_LIFE, BatchWork, ItemResult
from workbench.serve.batches.message_batch_body import MessageBatchBody, read_requests
from workbench.serve.batches.openai_batch_routes import UPLOAD_SECONDS, page
from workbench.serve.batches.stored_files import FileWriter
from workbench.serve.batches.upload import file_response, mapped, receive_body
from workbench.serve.bodies.fields import IgnoredFields
from workbench.serve.document import describe_body
from workbench.serve.errors import ApiError
from workbench.serve.json_bytes import dumps
from workbench.serve.responses import ignored_header, json_response

if TYPE_CHECKING:
    from workbench.serve.service import Service

PATH = "/v1/messages/batches"


@dataclass
class MessageBatch:
    """A batch of messages, its work, and the file of its results."""

    id: str
    tenant: str
    describe: Any  # returns an ApiError in the protocol's shape
    results: FileWriter
    work: BatchWork = field(init=False)  # set before the batch is added to a store

    def write(self, result: ItemResult, must: bool) -> None:
        """Write a result line; with `must`, even if it exceeds the budget of bytes."""
        values: dict[str, Any] = {"type": result.ending}
        if result.answer is not None:
            values["message"] = result.answer
        elif result.error is not None:
            values["error"] = self.describe(result.error)
        self.results.write(dumps({"custom_id": result.custom_id, "result": values}) + b"\n", must)

    async def finish(self) -> None:
        """Do nothing: the results stay as written for the life of the batch."""

    def discard(self) -> None:
        self.results.discard()

    def as_json(self, base: str) -> dict[str, Any]:
        work = self.work
        status = "ended" if work.has_ended else "in_progress" if work.canceled_at is None else "canceling"
        # In the protocol no request counts as ended before the whole batch has ended.
        counts = work.counts
        if not work.has_ended:
            counts = {name: sum(counts.values()) if name == "processing" else 0 for name in counts}
        return {
            "id": self.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": counts,
            "created_at": _time(work.created),
            "expires_at": _time(work.created + SECONDS_OF_LIFE),
            "ended_at": _time(work.ended_at),
            "cancel_initiated_at": _time(work.canceled_at),
            "archived_at": None,
            "results_url": f"{base}{PATH}/{self.id}/results" if work.has_ended else None,
        }


def message_batch_routes(service: Service, store: BatchStore) -> APIRouter:
    """Return the routes; a batch belongs to the tenant that created it, and is kept until it is deleted or expires."""
    router = APIRouter()
    dialect = service.dialects["anthropic.messages"]

    async def batch_of(request: Request, id: str) -> MessageBatch:
        found = store.get(MessageBatch, (await service.identify(request)).tenant, id)
        if found is None:
            raise ApiError("not_found_error", f"message_batch_id: no batch {id[:80]!r}", "message_batch_id")
        return found

    @router.post(PATH, summary="Answer many messages in the background", openapi_extra=describe_body(MessageBatchBody))
    async def create(request: Request) -> Response:
        caller = await service.identify(request)
        limits = service.settings
        ignored = IgnoredFields(limits.refuses_unknown)
        body = await receive_body(request, store.files, caller.tenant, limits.max_upload_bytes, UPLOAD_SECONDS)

        def read() -> BatchRequests:
            with mapped(body.path) as content:
                items = read_requests(content[:], dialect.path, ignored)
                return BatchRequests.write(store.files, caller.tenant, items, limits.max_body_bytes)

        try:
            requests = await store.read_requests(caller.tenant, read)
        finally:
            body.discard()
        results = store.files.writer(caller.tenant, "", "message_results")
        id = f"msgbatch_{secrets.token_hex(12)}"
        found = MessageBatch(id, caller.tenant, lambda e: dialect.error(e, "")[1], results)
        found.work = BatchWork(service, store.slots, caller, requests, found.write, found.finish)
        store.add(found)
        return json_response(200, found.as_json(_base(request)), ignored_header(ignored))

    @router.get(PATH, summary="List the batches")
    async def list_batches(request: Request, limit: int = 20, after_id: str = "", before_id: str = "") -> Response:
        owner = (await service.identify(request)).tenant
        mine = [each.as_json(_base(request)) for each in store.list(MessageBatch, owner)]
        listed = page(mine, limit, after_id, before_id)
        return json_response(200, {name: value for name, value in listed.items() if name != "object"})

    @router.get(PATH + "/{batch_id}", summary="Return a batch")
    async def retrieve(batch_id: str, request: Request) -> Response:
        return json_response(200, (await batch_of(request, batch_id)).as_json(_base(request)))

    @router.get(PATH + "/{batch_id}/results", summary="Return the results of a batch that has ended, as JSON lines")
    async def results(batch_id: str, request: Request) -> Response:
        found = await batch_of(request, batch_id)
        if not found.work.has_ended:
            raise ApiError("invalid_request_error", "message_batch_id: the batch has not ended; ask again later")
        return file_response(found.results.path, "application/x-jsonl")

    @router.post(PATH + "/{batch_id}/cancel", summary="Cancel a batch; what has ended keeps its results")
    async def cancel(batch_id: str, request: Request) -> Response:
        found = await batch_of(request, batch_id)
        found.work.cancel()
        return json_response(200, found.as_json(_base(request)))

    @router.delete(PATH + "/{batch_id}", summary="Delete a batch that has ended")
    async def delete(batch_id: str, request: Request) -> Response:
        found = await batch_of(request, batch_id)
        if not found.work.has_ended:
            words = "message_batch_id: the batch has not ended; cancel it before you delete it"
            raise ApiError("invalid_request_error", words, "message_batch_id")
        store.remove(found)
        return json_response(200, {"id": batch_id, "type": "message_batch_deleted"})

    return router


def _base(request: Request) -> str:
    return str(request.base_url).rstrip("/")


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
