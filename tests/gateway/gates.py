"""Carry calls through a gateway without a server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.event_loop import run_async
from tests.gateway.calls import Models, answer, outcome
from workbench.gateway.gate import Gateway
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
