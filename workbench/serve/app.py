"""Build the HTTP application: routes of the dialects and of the workbench itself, all but /health behind the gate."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workbench.serve.batches.batch_store import BatchStore
from workbench.serve.batches.message_batch_routes import message_batch_routes
from workbench.serve.batches.openai_batch_routes import openai_batch_routes, page
from workbench.serve.bodies.fields import IgnoredFields
from workbench.serve.call import ADMIN
from workbench.serve.config import ServerSettings
from workbench.serve.dialect import Dialect
from workbench.serve.dialects import DIALECTS, SIGN_THOUGHTS
from workbench.serve.dialects.anthropic import models as anthropic_models
from workbench.serve.dialects.responses.store import ResponseStore
from workbench.serve.document import OBJECT, build_document, describe_body, describe_responses
from workbench.serve.errors import STATUS, ApiError
from workbench.serve.gate import Gate, OpenGate
from workbench.serve.responses import answer, error_response, ignored_header, json_response
from workbench.serve.served_model import ServedModel
from workbench.serve.service import Service, as_api_error
from workbench.serve.watch import metrics

PARTS_OF_LISTS = ("limit", "order", "after", "before", "after_id", "before_id", "purpose", "starting_after")


def load_dialects(signing_key: bytes = b"", settings: ServerSettings | None = None) -> dict[str, Dialect]:
    """Return the dialects by name; thoughts are signed with `signing_key`, or a key of this process."""
    settings = settings or ServerSettings()
    given: dict[str, tuple[object, ...]] = {name: (signing_key,) for name in SIGN_THOUGHTS}
    given["openai.responses"] += (ResponseStore(settings.response_bytes, settings.response_seconds),)
    found: dict[str, Dialect] = {}
    for name, where in DIALECTS.items():
        module, _, kind = where.partition(":")
        build = getattr(importlib.import_module(f"workbench.serve.dialects.{module}"), kind)
        found[name] = build(*given.get(name, ()))
    return found


def build_app(
    models: Mapping[str, ServedModel], gate: Gate | None = None, settings: ServerSettings | None = None
) -> FastAPI:
    """Return the application that serves `models`. Its `state.service` has the running calls."""
    gate = gate or OpenGate()
    settings = settings or ServerSettings()
    service = Service(models, gate, load_dialects(gate.signing_key(), settings), settings)
    batches = BatchStore(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        await batches.close()
        await service.close()

    app = FastAPI(
        title="Inference Workbench", version=version("inference-workbench"), lifespan=lifespan,
        openapi_url=None, docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.state.service, app.state.batches = service, batches
    app.add_middleware(_ListIgnored)
    app.add_api_route("/health", _health, methods=["GET"], summary="Say that the server is there")
    app.add_api_route("/health", _health, methods=["HEAD"], include_in_schema=False)

    async def identify(request: Request) -> None:
        await service.identify(request)
        _check_query(request, IgnoredFields(settings.refuses_unknown))

    errors = [each.error_schema for each in service.dialects.values()]
    described = describe_responses(OBJECT, errors)
    guarded = APIRouter(dependencies=[Depends(identify)], responses=described)
    for dialect in service.dialects.values():
        _add_dialect(guarded, service, dialect)
    _add_own_routes(guarded, app, service)
    for batch_routes in (openai_batch_routes, message_batch_routes):
        guarded.include_router(batch_routes(service, batches))
    for router in service.gate.routes():
        guarded.include_router(router)  # type: ignore[arg-type] (the gate's contract names no library)
    app.include_router(guarded)
    _add_error_handlers(app, service)
    return app


def _check_query(request: Request, ignored: IgnoredFields) -> None:
    """Refuse paging fields on a route without paging (ApiError), where a client would take the whole list for a page.
    Other unknown fields go into a header of the response."""
    route = request.scope.get("route")
    if route is not None and (request.method == "GET" or not ignored.is_strict):  # clients mark betas in other requests
        known = {each.alias for each in route.dependant.query_params}
        asked = sorted(set(request.query_params).intersection(PARTS_OF_LISTS) - known)
        if asked and request.method == "GET":
            IgnoredFields(is_strict=True).unknown(f"query.{asked[0]}", known)
        ignored.check(request.query_params, known, "query")
        request.state.ignored = ignored_header(ignored)


class _ListIgnored:
    """Add the header of a query's ignored fields to its response."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_listed(message: Message) -> None:
            if message["type"] == "http.response.start":
                for name, value in scope.get("state", {}).get("ignored", {}).items():
                    message["headers"] = [*message["headers"], (name.encode(), value.encode())]
            await send(message)

        await self._app(scope, receive, send_listed if scope.get("query_string") else send)


async def _health(request: Request) -> Response:
    service: Service = request.app.state.service
    if service.is_draining:
        return json_response(503, {"status": "draining"}, {"retry-after": "1"})
    stuck = {name: why for name in service.models if (why := service.stuck(name))}
    if stuck:
        return json_response(503, {"status": "stuck", "models": stuck})
    return json_response(200, {"status": "ok"})


def _add_dialect(router: APIRouter, service: Service, dialect: Dialect) -> None:
    async def endpoint(request: Request) -> Response:
        return await answer(service, request, dialect)

    streams = "stream" in dialect.body.model_fields
    responses = describe_responses(dialect.answer_schema, [dialect.error_schema], streams)
    router.add_api_route(
        dialect.path, endpoint, methods=["POST"], name=dialect.name, openapi_extra=describe_body(dialect.body),
        responses=responses,
    )  # fmt: skip
    for further in dialect.routes(service):
        router.include_router(further)
    for counter in dialect.tokenizers():
        _add_dialect(router, service, counter)


def _add_own_routes(router: APIRouter, app: FastAPI, service: Service) -> None:
    @router.get("/v1/models", summary="List the models, in the shape of the protocol that the headers name")
    async def models(request: Request, limit: int = 1000, after_id: str = "", before_id: str = "") -> Response:
        permitted = service.models_of(await service.identify(request)).values()
        if "anthropic-version" in request.headers:
            return json_response(200, anthropic_models.list_models(permitted, limit, after_id, before_id))
        found = page([_described(each, request) for each in permitted], limit, after_id, before_id)
        return json_response(200, {"object": "list", "data": found["data"]})

    @router.get("/v1/models/{name:path}", summary="Return one model")
    async def model(name: str, request: Request) -> Response:
        return json_response(200, _described(service.model_for(await service.identify(request), name), request))

    @router.get("/v1/traces/{call_id}", summary="Return the trace of one of the caller's calls")
    async def trace(call_id: str, request: Request) -> Response:
        caller = await service.identify(request)
        found = service.traces.get(call_id, caller)
        if found is None:
            raise ApiError("not_found_error", f"no trace of {call_id[:100]!r}: it is not yours, or no longer kept")
        return json_response(200, await service.in_thread(lambda: found.as_json(caller)))

    @router.post("/v1/traces/{call_id}/replay", summary="Run a call again among its neighbours; for administrators")
    async def replay(call_id: str, request: Request) -> Response:
        if ADMIN not in (await service.identify(request)).scopes:
            raise ApiError("permission_error", "a replay shows other callers' requests: use a key with the scope admin")
        return json_response(200, await service.replays.run(call_id, service.in_thread))

    @router.get("/v1/server", summary="Return what the server does now; for administrators")
    async def snapshot(request: Request) -> Response:
        if ADMIN not in (await service.identify(request)).scopes:
            raise ApiError("permission_error", "/v1/server shows what all callers do: use a key with the scope admin")
        return json_response(200, await service.in_thread(lambda: service.log.snapshot().to_dict()))

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", summary="Return metrics for Prometheus", response_class=PlainTextResponse)
    async def metrics_page(request: Request) -> Response:
        if not service.settings.metrics_open and ADMIN not in (await service.identify(request)).scopes:
            raise ApiError("permission_error", "/metrics shows sums of all callers: use a key with the scope admin")
        return Response(service.metrics.page(), headers={"content-type": metrics.CONTENT_TYPE})

    @router.get("/openapi.json", summary="Return this document")
    async def document() -> Response:
        return json_response(200, build_document(app))


def _described(model: ServedModel, request: Request) -> dict[str, Any]:
    """Return the public description of a model, in OpenAI's or Anthropic's shape."""
    if "anthropic-version" in request.headers:
        return anthropic_models.describe_model(model)
    return {
        "id": model.name, "object": "model", "created": model.created, "owned_by": "workbench",
        "root": model.runner.model.spec.name, "max_model_len": model.max_model_len,
    }  # fmt: skip


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    def respond(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error), dialect_of(request, service))

    def respond_to_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException) or hasattr(error, "status_code")
        status = getattr(error, "status_code", 500)
        kinds = {404: "not_found_error", 405: "invalid_request_error"}
        words = {404: f"no route {request.url.path!r}", 405: f"{request.method} is not for {request.url.path!r}"}
        kind = kinds.get(status) or next((name for name, code in STATUS.items() if code == status), "api_error")
        found = ApiError(kind, words.get(status, str(getattr(error, "detail", error))))
        response = error_response(found, dialect_of(request, service))
        response.status_code = status
        return response

    def respond_to_arguments(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(each) for each in first["loc"][1:])
        found = ApiError("invalid_request_error", f"{place}: {first['msg']}", place)
        return error_response(found, dialect_of(request, service))

    app.add_exception_handler(ApiError, respond)
    app.add_exception_handler(RequestValidationError, respond_to_arguments)
    app.add_exception_handler(404, respond_to_http)
    app.add_exception_handler(405, respond_to_http)
    app.add_exception_handler(Exception, respond)


def dialect_of(request: Request, service: Service) -> Dialect:
    """Return the dialect in which to answer an error: chosen by the request's path, else by its headers."""
    dialects = service.dialects
    path = request.url.path
    for dialect in sorted(dialects.values(), key=lambda each: len(each.path), reverse=True):
        if path == dialect.path or path.startswith(dialect.path + "/"):
            return dialect
    if "anthropic-version" in request.headers and "anthropic.messages" in dialects:
        return dialects["anthropic.messages"]
    return dialects["openai.chat"]
