"""Let two pools serve as one replica of a cluster, so that a server may stand in front of them."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    """The front's handle of two pools, which replace a dead engine themselves. It is lost with their coordinator.

    Args:
        number: of the replica.
        pools: makes the pools, with a listener that it is given.
        ended: called, in a thread, with this replica once all processes of its pools have ended.
    """

    def __init__(
        self,
        number: int,
        pools: Callable[[Callable[[Event], None]], PrefillDecodePools],
        ended: Callable[[PoolsReplica], None] = lambda replica: None,
    ):
        self.number, self.busy_seconds = number, 0.0
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.pools = pools(self._hear)
        first = self.pools.slots[0]
        layout = first.described
        named = f"{first.config!r} {layout.layout.model if layout else ''}"
        fingerprint = f"fp_{hashlib.sha256(named.encode()).hexdigest()[:12]}"
        smallest = min(max(each.described.num_pages) for each in self.pools.slots if each.described is not None)
        tokens = smallest * first.config.cache.page_size
        self.ready = ReadyPools(self.pools.pages, os.getpid(), fingerprint, tokens)
        self._is_stopped, self._lock, self._ended = False, threading.Lock(), ended
        self._closing = threading.Thread(target=self._close_pools, name=f"end of replica {number}", daemon=True)

    def _close_pools(self) -> None:
        self.pools.close()
        self._ended(self)

    def _hear(self, event: Event) -> None:
        if not event.request_id:  # of a step; those of requests come to what they were submitted with
            self._events.put(event)

    @property
    def lost_by(self) -> str:
        """Return why they serve no more; empty while they do."""
        return self.pools.error

    def submit(self, requests: Sequence[Request]) -> None:
        with suppress(WorkbenchError):  # they have ended: the replica is lost, and `listen` says so
            for request in requests:
                self.pools.submit(request, self._events.put)

    def cancel(self, request_id: str) -> None:
        with suppress(WorkbenchError):
            self.pools.cancel(request_id)

    def call(self, function: Callable[[Any], Any]) -> Any:
        raise WorkbenchError("pools of prefill and decode are several runners; none answers for them")

    def stop(self) -> None:
        with self._lock:  # the thread that hears a loss stops it, too
            if self._is_stopped:
                return
            self._is_stopped = True
            self._closing.start()
        self._events.put(None)

    def close(self) -> None:
        """Stop them, and wait until all their processes have ended; not for the front's thread."""
        self.stop()
        self._closing.join()

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[str], None]) -> None:
        """Hear their events until they are stopped or lost; for a thread of its own."""
        while True:
            found: list[Event | None] = []
            with suppress(queue.Empty):
                found.append(self._events.get(timeout=LOOK_SECONDS))
            while not self._events.empty():
                found.append(self._events.get())
            if (why := self.lost_by) and not self._is_stopped:  # the ends that came with it are no answers
                self.stop()
                on_lost(f"replica {self.number}: {why}")
                return
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
        options: others of `PrefillDecodePools`.
    """

    replica = PoolsReplica

    def __init__(self, num_prefill: int, num_decode: int, transfer: Transfer = "shared", **options: Any):
        if num_prefill < 1 or num_decode < 1:
            raise WorkbenchError(f"prefill: {num_prefill}, decode: {num_decode}; give each an engine at least")
        self._sizes = num_prefill, num_decode
        self._options = {"transfer": transfer, **options}
        self._started: list[PoolsReplica] = []  # that have not ended

    def start(self, number: int, config: EngineConfig) -> PoolsReplica:
        """Start two pools and wait until they can serve (WorkbenchError where they cannot)."""
        ended = lambda replica: self._started.remove(replica)  # noqa: E731 (of a list that is bound later)
        made = self.replica(number, lambda hear: self.pools(config, hear), ended)
        self._started.append(made)
        return made

    def pools(self, config: EngineConfig, hear: Callable[[Event], None]) -> PrefillDecodePools:
        """Start the processes of a replica, which `hear` hears."""
        return PrefillDecodePools(config, *self._sizes, listener=hear, **self._options)

    def cancel_starts(self) -> None:
        """Do nothing: pools start to the end."""

    def close(self) -> None:
        """End all pools and wait for that."""
        left = tuple(self._started)  # those that end are forgotten
        for each in left:
            each.stop()
        for each in left:
            each.close()
