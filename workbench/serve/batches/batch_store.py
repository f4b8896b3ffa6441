"""Keep the batches of all tenants, with their shared files, threads and slots."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from workbench.serve.batches.batch_requests import BatchRequests
from workbench.serve.batches.batch_work import BatchWork
from workbench.serve.batches.call_slots import CallSlots
from workbench.serve.batches.stored_files import FileStore
from workbench.serve.errors import ApiError

if TYPE_CHECKING:
    from workbench.serve.service import Service

MAX_BATCHES = 256  # per tenant; the oldest finished batches are dropped first
Result = TypeVar("Result")


class Batch(Protocol):
    """The interface of a batch of either protocol; its `work` must begin before the batch is added to a store."""

    id: str
    tenant: str

    @property
    def work(self) -> BatchWork: ...

    def discard(self) -> None:
        """Delete the results that are kept only as long as the batch."""
        ...


BatchKind = TypeVar("BatchKind", bound=Batch)


class BatchStore:
    """Batches by id, until they are deleted or `batch_result_seconds` have passed since their end."""

    def __init__(self, service: Service):
        self._service, settings = service, service.settings
        folder = None if settings.files_folder is None else Path(settings.files_folder)
        self.files = FileStore(
            folder, max_tenant_bytes=settings.max_tenant_files_bytes, max_bytes=settings.max_files_bytes
        )
        self.slots = CallSlots(service)
        self.seconds = settings.batch_result_seconds
        self._batches: OrderedDict[str, Batch] = OrderedDict()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="batches")  # one upload is parsed at a time

    def add(self, batch: Batch) -> None:
        self._batches[batch.id] = batch

    def get(self, kind: type[BatchKind], tenant: str, id: str) -> BatchKind | None:
        """Return a tenant's batch; None for a batch of another tenant or kind."""
        self._expire()
        found = self._batches.get(id)
        return found if isinstance(found, kind) and found.tenant == tenant else None

    def list(self, kind: type[BatchKind], tenant: str) -> list[BatchKind]:
        """Return a tenant's batches, newest first."""
        self._expire()
        return [each for each in reversed(self._batches.values()) if isinstance(each, kind) and each.tenant == tenant]

    def remove(self, batch: Batch) -> None:
        del self._batches[batch.id]
        batch.discard()

    def _make_room(self, tenant: str) -> None:
        """Drop a tenant's oldest finished batch if the limit is reached (ApiError if none has ended)."""
        self._expire()
        mine = [each for each in self._batches.values() if each.tenant == tenant]
        if len(mine) < MAX_BATCHES:
            return
        oldest = next((each for each in mine if each.work.has_ended), None)
        if oldest is None:
            words = f"{len(mine)} batches are in progress, which is the limit; wait for one to end, or cancel it"
            raise ApiError("rate_limit_error", words, headers={"retry-after": "60"})
        self.remove(oldest)

    async def read_requests(self, tenant: str, read: Callable[[], BatchRequests]) -> BatchRequests:
        """Write the requests that `read` yields to disk, in a thread, and return them (ApiError if the tenant has too
        many batches).
        """
        self._make_room(tenant)
        requests = await self.in_thread(read)
        try:
            self._make_room(tenant)  # other batches may have been added meanwhile
        except ApiError:
            requests.discard()
            raise
        return requests

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Run `function()` in a thread, after earlier calls of this method, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def close(self) -> None:
        """Cancel running batches, and keep their results so far. The wait for a stuck engine is bounded."""
        works = [each.work for each in self._batches.values()]
        for work in works:
            work.cancel()
        await self._service.wait_for([asyncio.create_task(work.wait()) for work in works], background_only=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _expire(self) -> None:
        self.files.expire()
        before = time.time() - self.seconds
        for each in list(self._batches.values()):
            if each.work.ended_at is not None and each.work.ended_at < before:
                self.remove(each)
