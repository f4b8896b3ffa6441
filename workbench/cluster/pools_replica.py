"""Let two pools serve as one replica of a cluster, so that a server may stand in front of them."""

from __future__ import annotations

import hashlib
import os
import queue
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from workbench.cluster.apart.pool_messages import Transfer
from workbench.cluster.pools import PrefillDecodePools
from workbench.cluster.replica import PageCounts, Report
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError
from workbench.request import Request
from workbench.trace.events import Event

LOOK_SECONDS = 1.0  # between looks whether the pools' coordinator lives


class ReadyPools(NamedTuple):
    """Pools that can serve, as `ReadyReplica`."""

    pages: PageCounts
    process_id: int
    fingerprint: str
    cache_tokens: int


class PoolsReplica:
    """The front's handle of two pools, which replace a dead engine themselves. It is lost with their coordinator."""

    def __init__(self, number: int, config: EngineConfig, num_prefill: int, num_decode: int, transfer: Transfer):
        self.number, self.busy_seconds = number, 0.0
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.pools = PrefillDecodePools(config, num_prefill, num_decode, transfer=transfer, listener=self._hear)
        layout = self.pools.slots[0].described
        named = f"{config!r} {layout.layout.model if layout else ''}"
        fingerprint = f"fp_{hashlib.sha256(named.encode()).hexdigest()[:12]}"
        smallest = min(max(each.described.num_pages) for each in self.pools.slots if each.described is not None)
        tokens = smallest * config.cache.page_size
        self.ready = ReadyPools(self.pools.pages, os.getpid(), fingerprint, tokens)
        self._is_stopped = False

    def _hear(self, event: Event) -> None:
        if not event.request_id:  # of a step; those of requests come to what they were submitted with
            self._events.put(event)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.pools.submit(request, self._events.put)

    def cancel(self, request_id: str) -> None:
        self.pools.cancel(request_id)

    def call(self, function: Callable[[Any], Any]) -> Any:
        raise WorkbenchError("pools of prefill and decode are several runners; none answers for them")

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self.pools.close()
            self._events.put(None)

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[str], None]) -> None:
        """Hear their events until they are stopped or lost; for a thread of its own."""
        while True:
            try:
                found = [self._events.get(timeout=LOOK_SECONDS)]
            except queue.Empty:
                if self.pools.error and not self._is_stopped:
                    on_lost(self.pools.error)
                    return
                continue
            while not self._events.empty():
                found.append(self._events.get())
            events = tuple(event for event in found if event is not None)
            if events and not self._is_stopped:
                on_report(Report(events, self.pools.pages))
            if None in found:
                return


class PoolsLauncher:
    """Start pools in the place of replicas.

    Args:
        num_prefill: engines that compute prompts.
        num_decode: engines that decode.
        transfer: how pages travel.
    """

    def __init__(self, num_prefill: int, num_decode: int, transfer: Transfer = "shared"):
        if num_prefill < 1 or num_decode < 1:
            raise WorkbenchError(f"prefill: {num_prefill}, decode: {num_decode}; give each an engine at least")
        self._sizes = num_prefill, num_decode
        self._transfer: Transfer = transfer
        self._started: list[PoolsReplica] = []

    def start(self, number: int, config: EngineConfig) -> PoolsReplica:
        """Start two pools and wait until they can serve (WorkbenchError where they cannot)."""
        self._started.append(PoolsReplica(number, config, *self._sizes, self._transfer))
        return self._started[-1]

    def cancel_starts(self) -> None:
        """Do nothing: pools start to the end."""

    def close(self) -> None:
        for each in self._started:
            each.stop()
