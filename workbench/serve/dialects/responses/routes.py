"""Answer the routes of stored responses: read one again, list its input, delete it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from workbench.serve.dialect import RouteServices
from workbench.serve.dialects.responses.store import ResponseStore
from workbench.serve.errors import invalid_field
from workbench.serve.responses import json_response


def response_routes(store: ResponseStore, services: RouteServices) -> APIRouter:
    """Return the routes of stored responses; a caller sees the responses of its tenant."""
    router = APIRouter()

    @router.get("/v1/responses/{response_id}", summary="Return a stored response")
    async def retrieve(response_id: str, request: Request, stream: bool = False) -> Response:
        if stream:
            raise invalid_field("stream", "a stored response is not streamed again; leave it out")
        return json_response(200, store.get(response_id, await tenant(request)).response)

    @router.delete("/v1/responses/{response_id}", summary="Delete a stored response")
    async def delete(response_id: str, request: Request) -> Response:
        store.delete(response_id, await tenant(request))
        return json_response(200, {"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items", summary="List the items of a response's input")
    async def input_items(
        response_id: str, request: Request, order: str = "desc", limit: int = 20, after: str = ""
    ) -> Response:
        items = store.get(response_id, await tenant(request)).input_items
        return json_response(200, _page(items, order, limit, after))

    @router.post("/v1/responses/{response_id}/cancel", summary="Refuse to cancel: none runs in the background")
    async def cancel(response_id: str, request: Request) -> Response:
        store.get(response_id, await tenant(request))
        raise invalid_field("response_id", "the response is complete; to cancel one earlier, close its stream")

    async def tenant(request: Request) -> str:
        return (await services.identify(request)).tenant

    return router


def _page(items: list[dict[str, Any]], order: str, limit: int, after: str) -> dict[str, Any]:
    if order not in ("asc", "desc"):
        raise invalid_field("order", f"{order[:50]!r} is unknown; known: asc, desc")
    if not 1 <= limit <= 100:
        raise invalid_field("limit", f"{limit} is not from 1 to 100")
    listed = items if order == "asc" else items[::-1]
    if after:
        places = [n for n, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise invalid_field("after", f"no item {after[:80]!r}")
        listed = listed[places[0] + 1 :]
    page = listed[:limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return {"object": "list", "data": page, "has_more": len(listed) > limit, **ends}
