"""Store bytes by key with a lifetime, in this process or in Redis."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from workbench.gateway.limits.limits_redis import STORE_ERRORS, connect


class MemoryAnswers:
    """A store in this process. It holds the most recently used values, of at most `max_bytes` in all."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._max_bytes, self._clock = max_bytes, clock
        self._values: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self.num_bytes = 0

    async def get(self, key: str) -> bytes | None:
        expiry, value = self._values.get(key, (0.0, b""))
        if key not in self._values or expiry <= self._clock():
            self._forget(key)
            return None
        self._values.move_to_end(key)
        return value

    async def put(self, key: str, value: bytes, seconds: float) -> None:
        self._forget(key)
        if len(key) + len(value) > self._max_bytes:
            return
        self._values[key] = (self._clock() + seconds, value)
        self.num_bytes += len(key) + len(value)
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._values)))

    async def close(self) -> None:
        self._values.clear()
        self.num_bytes = 0

    def _forget(self, key: str) -> None:
        _, value = self._values.pop(key, (0.0, None))
        if value is not None:
            self.num_bytes -= len(key) + len(value)


class RedisAnswers:
    """A store in a Redis server. While it is unreachable, all lookups miss and no value is stored."""

    def __init__(self, url: str, prefix: str = "workbench:answers:", timeout: float = 1.0):
        self._client, self._prefix = connect(url, timeout=timeout), prefix

    async def get(self, key: str) -> bytes | None:
        try:
            found = await self._client.get(self._prefix + key)
        except STORE_ERRORS:
            return None
        return found.encode() if isinstance(found, str) else found

    async def put(self, key: str, value: bytes, seconds: float) -> None:
        try:
            await self._client.set(self._prefix + key, value, px=max(1, int(seconds * 1000)))
        except STORE_ERRORS:
            return

    async def close(self) -> None:
        await self._client.aclose()
