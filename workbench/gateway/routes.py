"""Offer a gateway's own routes: usage, limits and keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from workbench.gateway.accounting import Accounts
from workbench.gateway.config import LimitsConfig
from workbench.gateway.keys import ADMIN, KeyStore
from workbench.gateway.limits.limits import Limiter
from workbench.gateway.limits.limits_redis import STORE_ERRORS
from workbench.gateway.usage_page import MAX_ROWS, read_group, usage_page
from workbench.serve.call import Caller
from workbench.serve.errors import ApiError


def gateway_routes(
    identify: Callable[[Mapping[str, str]], Awaitable[Caller]],
    limits: LimitsConfig,
    limiter: Limiter,
    accounts: Accounts,
    currency: str,
    keys: KeyStore | None,
) -> APIRouter:
    """Return the routes of a gateway: usage, limits and keys. Administrators see all, others their own.

    `identify` returns the caller of a request from its headers (ApiError).
    """
    router = APIRouter(tags=["gateway"])

    async def caller_of(request: Request) -> Caller:
        return await identify(request.headers)

    @router.get("/v1/usage")
    async def usage(
        request: Request, by: str = "day", since: str = "", limit: int = 1_000, after: str = ""
    ) -> Response:
        """Return tokens and costs by day, key, tenant, model, dialect, ended or id, one or several with commas between.

        Rows are sorted, `limit` of them at most; the next ones come with the answer's `last` as `after`.
        """
        caller = await caller_of(request)
        where = {} if ADMIN in caller.scopes else {"tenant": caller.tenant}
        if not 1 <= limit <= MAX_ROWS:
            raise ApiError("invalid_request_error", f"limit: {limit} is not from 1 to {MAX_ROWS:,}", "limit")
        names, last = tuple(filter(None, by.split(","))), read_group(after)
        try:
            page = await asyncio.to_thread(usage_page, accounts, currency, names, since, where, limit, last)
        except ValueError as error:
            field = str(error).split()[1]  # usage by, usage since, usage after
            raise ApiError("invalid_request_error", str(error), field) from None
        return Response(page, media_type="application/json")

    @router.get("/v1/limits")
    async def show_limits(request: Request) -> dict[str, Any]:
        """Return what remains of the caller's limits."""
        caller = await caller_of(request)
        holders = limits.holders(caller)
        try:
            remaining = await limiter.remaining(holders) if holders else ()
        except STORE_ERRORS:
            raise ApiError("unavailable_error", "limits cannot be read now; try again") from None
        return {"object": "list", "data": [each._asdict() for each in remaining]}

    @router.get("/v1/keys")
    async def show_keys(request: Request) -> dict[str, Any]:
        """Return the keys, without their hashes."""
        caller = await caller_of(request)
        if ADMIN not in caller.scopes:
            raise ApiError("permission_error", "keys are shown to administrators; use a key with that scope")
        listed = () if keys is None else keys.list()
        return {
            "object": "list",
            "data": [
                each.model_dump(mode="json", exclude={"credentials"}) | {"state": each.state(time.time())}
                for each in listed
            ],
        }

    return router
