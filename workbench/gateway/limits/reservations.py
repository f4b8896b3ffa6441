"""Reserve the maximum cost of calls, renew reservations of running calls, and return them, also after a
cancellation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from workbench.gateway.limits.limits import Cost, Holder, Limiter, Reservation
from workbench.gateway.limits.limits_redis import STORE_ERRORS

LOG = logging.getLogger(__name__)
ONE_REQUEST = Cost(requests=1)  # cost of a call that only counts as a request


class Reservations:
    """The reservations of one gateway. The gateway renews them, so they expire only if it has died.

    Args:
        limiter: the store of reservations.
        seconds: lifetime of a reservation without renewal; each is renewed three times within it.
    """

    def __init__(self, limiter: Limiter, seconds: float):
        self.limiter, self.seconds = limiter, seconds
        self._running: dict[str, Sequence[Holder]] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()

    async def reserve(self, holders: Sequence[Holder], lease: str, cost: Cost) -> Reservation:
        """Reserve a cost under the name `lease`. If the calling task is cancelled in the meantime, the reservation is
        returned.

        Raises:
            RedisError, OSError, TimeoutError: if Redis is unreachable. A reservation that it may have made is returned.
        """
        asking = asyncio.ensure_future(self.limiter.reserve(holders, lease, cost, self.seconds))
        try:
            found = await asyncio.shield(asking)
        except BaseException:  # cancelled, or no response to a request that may have arrived
            self._spawn(self._undo(asking, holders, lease, cost))
            raise
        if found.granted:
            self._running[lease] = holders
            self._renewing = self._renewing or asyncio.create_task(self._renew())
        return found

    async def give_back(self, holders: Sequence[Holder], lease: str, reserved: Cost, used: Cost, begun: int) -> None:
        """End a lease, even if the calling task is cancelled in the meantime (errors as in `reserve`)."""
        self._running.pop(lease, None)
        await asyncio.shield(self._spawn(self.limiter.give_back(holders, lease, reserved, used, begun)))

    async def renew(self) -> None:
        """Renew the leases of all running calls."""
        for lease, holders in list(self._running.items()):
            try:
                await self.limiter.renew(holders, lease, self.seconds)
            except STORE_ERRORS as error:
                LOG.warning("limits: reservations cannot be renewed now: %s", error)
                return

    async def close(self) -> None:
        """Finish pending returns, and close the limiter."""
        if self._renewing is not None:
            self._renewing.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.limiter.close()

    async def _undo(
        self, asking: asyncio.Future[Reservation], holders: Sequence[Holder], lease: str, cost: Cost
    ) -> None:
        begun = time.time_ns() // 1000
        with suppress(*STORE_ERRORS):
            found = await asking
            begun = found.now
            if not found.granted:
                return
        with suppress(*STORE_ERRORS):
            await self.limiter.give_back(holders, lease, cost, Cost(requests=cost.requests), begun)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.seconds / 3)
            await self.renew()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
