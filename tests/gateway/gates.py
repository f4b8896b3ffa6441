"""Carry calls through a gateway without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.event_loop import run_async
from tests.gateway.calls import Models, answer, outcome
from workbench.gateway.gate import Gateway
from workbench.gateway.limits.limits import DAY, MemoryLimiter
from workbench.serve.answers.pieces import Piece, Text
from workbench.serve.call import Call
from workbench.serve.errors import ApiError
from workbench.serve.gate import Gate


def run(use: Callable[[Gateway, Models], Coroutine[Any, Any, None]], **config: Any) -> None:
    async def whole() -> None:
        gateway, models = Gateway(config), Models()
        gateway.connect(models)
        try:
            await use(gateway, models)
        finally:
            await gateway.close()

    run_async(whole())


async def answered(
    gateway: Gate, call: Call, pieces: list[Piece] | None = None, ended: str = "finished"
) -> list[Piece]:
    """Carry a call out as the server does; return what left."""
    lease = await gateway.admit(call)
    whole = list(lease.answer) if lease.answer is not None else pieces or answer()
    left = [found for piece in whole for found in await lease.take([piece])]
    await lease.settle(outcome(whole, "kept" if lease.answer is not None else ended))
    return left


async def refused(gateway: Gate, call: Call) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await gateway.admit(call)
    return caught.value


def said(pieces: list[Piece]) -> str:
    return "".join(each.text for each in pieces if isinstance(each, Text))


class SlowLimiter(MemoryLimiter):
    """A limiter whose answer comes when it is let; its answer may be lost. It has a clock of its own."""

    def __init__(self) -> None:
        self.now = 20_700 * DAY
        super().__init__(lambda: self.now)
        self.asked, self.answers, self.renewed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def reserve(self, holders: Any, lease: str, cost: Any, seconds: float) -> Any:
        found = await super().reserve(holders, lease, cost, seconds)
        self.asked.set()
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return found

    async def renew(self, holders: Any, lease: str, seconds: float) -> None:
        await super().renew(holders, lease, seconds)
        self.renewed.set()


def slow_limiter(gateway: Gateway) -> SlowLimiter:
    gateway.limiter = gateway.reservations.limiter = limiter = SlowLimiter()
    return limiter
