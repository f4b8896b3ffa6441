"""Keep values of each tenant for a while: bounded in bytes and time; no tenant finds another's."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Kept(Generic[Value]):
    value: Value
    size: int
    until: float


class TenantStore(Generic[Value]):
    """A store of values by tenant and key, bounded in bytes and time. Any thread may use it.

    Args:
        max_bytes: maximum bytes of all values together, as counted by callers.
        max_tenant_bytes: maximum bytes of one tenant, so that none displaces all others.
        seconds: lifetime after the last use.
        clock: returns seconds.
    """

    def __init__(
        self,
        max_bytes: int = 64 * 2**20,
        max_tenant_bytes: int = 16 * 2**20,
        seconds: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_bytes, self.max_tenant_bytes, self.seconds, self.clock = max_bytes, max_tenant_bytes, seconds, clock
        self.num_bytes = 0
        self._tenants: OrderedDict[str, OrderedDict[Hashable, _Kept[Value]]] = OrderedDict()  # both by last use
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def put(self, tenant: str, key: Hashable, value: Value, size: int) -> None:
        """Keep a value of `size` bytes, unless it is larger than `max_tenant_bytes`."""
        if size > min(self.max_bytes, self.max_tenant_bytes):
            return
        with self._lock:
            self._drop(tenant, key)
            mine = self._tenants.setdefault(tenant, OrderedDict())
            mine[key] = _Kept(value, size, self.clock() + self.seconds)
            self._tenants.move_to_end(tenant)
            self._sizes[tenant] = self._sizes.get(tenant, 0) + size
            self.num_bytes += size
            while self._sizes[tenant] > self.max_tenant_bytes:
                self._drop(tenant, next(iter(mine)))
            while self.num_bytes > self.max_bytes:
                oldest = next(iter(self._tenants))
                self._drop(oldest, next(iter(self._tenants[oldest])))

    def get(self, tenant: str, key: Hashable) -> Value | None:
        """Return a tenant's value and renew its lifetime; None if it is not kept."""
        with self._lock:
            found = self._tenants.get(tenant, {}).get(key)
            if found is None:
                return None
            if found.until <= self.clock():
                self._drop(tenant, key)
                return None
            self._tenants[tenant][key] = _Kept(found.value, found.size, self.clock() + self.seconds)
            self._tenants[tenant].move_to_end(key)
            self._tenants.move_to_end(tenant)
            return found.value

    def remove(self, tenant: str, key: Hashable) -> None:
        """Remove a tenant's value, if there is one."""
        with self._lock:
            self._drop(tenant, key)

    def _drop(self, tenant: str, key: Hashable) -> None:
        mine = self._tenants.get(tenant)
        if mine is None or key not in mine:
            return
        size = mine.pop(key).size
        self._sizes[tenant] -= size
        self.num_bytes -= size
        if not mine:
            del self._tenants[tenant], self._sizes[tenant]
