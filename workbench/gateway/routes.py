"""Define the gateway's own HTTP routes: usage, limits and keys."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from workbench.gateway.accounting import Accounts
from workbench.gateway.config import LimitsConfig
from workbench.gateway.keys import ADMIN, KeyStore
from workbench.gateway.limits.limits import Limiter
from workbench.gateway.limits.limits_redis import STORE_ERRORS
from workbench.serve.call import Caller
from workbench.serve.errors import ApiError

MAX_ROWS = 10_000  # maximum rows of one page of usage


def gateway_routes(
    identify: Callable[[Mapping[str, str]], Awaitable[Caller]],
    limits: LimitsConfig,
    limiter: Limiter,
    accounts: Accounts,
    currency: str,
    keys: KeyStore | None,
) -> APIRouter:
    """Return the routes of a gateway: usage, limits and keys. Administrators see all callers, other callers only
    themselves.

    `identify` returns the caller of a request from its headers (ApiError).
    """
    router = APIRouter(tags=["gateway"])

    async def caller_of(request: Request) -> Caller:
        return await identify(request.headers)

    @router.get("/v1/usage")
    async def usage(
        request: Request, by: str = "day", since: str = "", limit: int = 1_000, after: str = ""
    ) -> Response:
        """Return tokens and costs by day, key, tenant, model, dialect, ended or id, or several of these,
        comma-separated.

        Rows are sorted, at most `limit`; for the next page pass the answer's `last` as `after`.
        """
        caller = await caller_of(request)
        where = {} if ADMIN in caller.scopes else {"tenant": caller.tenant}
        if not 1 <= limit <= MAX_ROWS:
            raise ApiError("invalid_request_error", f"limit: {limit} is not from 1 to {MAX_ROWS:,}", "limit")
        names = tuple(filter(None, by.split(",")))

        def page() -> bytes:
            accounts.flush()
            rows = accounts.sums(names, since, where, limit + 1, _group(after))
            shown, has_more = rows[:limit], len(rows) > limit
            last = json.dumps(shown[-1].group) if has_more else None
            data = [each.as_dict(names) for each in shown]
            values = {"object": "list", "currency": currency, "data": data, "has_more": has_more, "last": last}
            return json.dumps(values).encode()

        try:
            return Response(await asyncio.to_thread(page), media_type="application/json")
        except ValueError as error:
            field = str(error).split()[1]  # usage by, usage since, usage after
            raise ApiError("invalid_request_error", str(error), field) from None

    @router.get("/v1/limits")
    async def show_limits(request: Request) -> dict[str, Any]:
        """Return the caller's remaining limits."""
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


def _group(after: str) -> list[str]:
    """Parse the group that a client sends as `after`; ApiError if it is invalid."""
    try:
        group = json.loads(after or "[]")
    except ValueError:
        group = None
    if not isinstance(group, list) or not all(isinstance(each, str) for each in group):
        raise ApiError("invalid_request_error", "after: is not the `last` of an earlier answer", "after")
    return group
