"""Run replicas of a cluster in processes. A replica is one engine, lost when its process ends, or a prefill and a
decode pool of engines.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from workbench.cluster.apart.pool_messages import Transfer
from workbench.cluster.apart.pool_processes import STARTERS, ChildProcess, EngineProcess, StartProcess
from workbench.cluster.pools import PrefillDecodePools
from workbench.cluster.replica import ReadyReplica, Report, combine_fingerprints
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError
from workbench.request import Request
from workbench.trace.events import Event

LOOK_SECONDS = 1.0  # interval of checks that the pools' coordinator is alive


class PoolsReplica:
    """The front's handle of a replica: one engine, or two pools, which replace dead engines themselves.

    The replica is lost when all of its processes have ended, or their coordinator has.

    Args:
        number: the replica's number.
        pools: creates the pools; its argument is a listener.
        ended: called in a thread with this replica once all processes of its pools have ended.
    """

    def __init__(
        self,
        number: int,
        pools: Callable[[Callable[[Event], None]], PrefillDecodePools],
        ended: Callable[[PoolsReplica], None] = lambda replica: None,
    ):
        self.number = number
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.pools = pools(self._events.put)
        try:
            self.ready = self._describe()
        except BaseException:
            self.pools.close()
            raise
        self._is_stopped, self._lock, self._ended = False, threading.Lock(), ended
        self._closing = threading.Thread(target=self._close_pools, name=f"end of replica {number}", daemon=True)

    def _describe(self) -> ReadyReplica:
        slots = self.pools.slots
        engines = [each.ready for each in slots if each.ready is not None]
        processes = [each.process for each in slots]  # read once, since the coordinator may set one to None
        ids = tuple(each.pid for each in processes if each is not None and each.pid is not None)
        fingerprint = combine_fingerprints(each.fingerprint for each in engines)
        return ReadyReplica(self.pools.pages, ids, fingerprint, min(each.cache_tokens for each in engines))

    def _close_pools(self) -> None:
        self.pools.close()
        self._ended(self)

    def _named(self, event: Event) -> Event:
        """Return an event with this replica's number if it has one engine; several have numbers of their pools."""
        return event if len(self.pools.slots) > 1 else replace(event, replica=self.number)

    @property
    def process_id(self) -> int | None:
        """Return the process id of the replica's only engine; None if it has ended, runs on another machine, or there
        are several.
        """
        first, *others = self.pools.slots
        process = first.process  # bound, since the coordinator may set it to None
        return None if others or process is None else process.pid

    @property
    def busy_seconds(self) -> float:
        """Return for how many seconds no engine has answered: the minimum over engines, which answer between
        two steps.
        """
        return min(slot.silent or 0.0 for slot in self.pools.slots)

    @property
    def lost_by(self) -> str:
        """Return why the pools no longer serve; empty while they do."""
        slots = self.pools.slots
        if self.pools.error or any(slot.state != "gone" for slot in slots):
            return self.pools.error
        return slots[0].error if len(slots) == 1 else "all its processes have ended"

    def submit(self, requests: Sequence[Request]) -> None:
        with suppress(WorkbenchError):  # the pools have ended: `listen` reports the loss
            self.pools.submit_to(_Unheard(), requests)

    def cancel(self, request_id: str) -> None:
        with suppress(WorkbenchError):
            self.pools.cancel(request_id)

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Run `function(runner)` in the replica's only engine, between two steps, and return its result."""
        if len(self.pools.slots) > 1:
            raise WorkbenchError("pools of prefill and decode have several runners, and no single one to return")
        return self.pools.call_engine(0, function)

    def stop(self) -> None:
        with self._lock:  # the thread that notices a loss stops it too
            if self._is_stopped:
                return
            self._is_stopped = True
            self._closing.start()
        self._events.put(None)

    def close(self) -> None:
        """Stop the pools and wait until all their processes have ended. Do not call it in the front's thread."""
        self.stop()
        self._closing.join()

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[str], None]) -> None:
        """Receive the pools' events until they are stopped or lost. Call it in a separate thread."""
        while True:
            found: list[Event | None] = []
            with suppress(queue.Empty):
                found.append(self._events.get(timeout=LOOK_SECONDS))
            while not self._events.empty():
                found.append(self._events.get())
            if (why := self.lost_by) and not self._is_stopped:  # Finished events caused by the loss are not results
                self.stop()
                on_lost(f"replica {self.number}: {why}")
                return
            events = tuple(self._named(event) for event in found if event is not None)
            if events and not self._is_stopped:
                on_report(Report(events, self.pools.pages))
            if None in found:
                return


class _Unheard:
    """A sink of events that the listener has received."""

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None: ...


class PoolsLauncher:
    """Start pools as replicas.

    Args:
        num_prefill: number of engines that compute prompts.
        num_decode: number of engines that decode.
        transfer: `shared` or `gloo`.
        processes: as of `PrefillDecodePools`.
        options: further arguments of `PrefillDecodePools`.
    """

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        transfer: Transfer = "shared",
        processes: Literal["child", "ray"] | StartProcess = "child",
        **options: Any,
    ):
        if num_prefill < 1 or num_decode < 1:
            raise WorkbenchError(f"prefill: {num_prefill}, decode: {num_decode}; give each an engine at least")
        start = STARTERS[processes] if isinstance(processes, str) else processes
        options |= {"num_prefill": num_prefill, "num_decode": num_decode, "transfer": transfer}
        self._prepare(start, options)

    def _prepare(self, start_process: StartProcess, options: dict[str, Any]) -> None:
        self._start_process, self._options = start_process, options
        self._started: list[PoolsReplica] = []  # not ended yet
        self._starting: dict[int, list[EngineProcess]] = {}  # processes of the starts in progress
        self._lock, self._is_cancelled = threading.Lock(), False

    def start(self, number: int, config: EngineConfig) -> PoolsReplica:
        """Start the processes of a replica and wait until they can serve (WorkbenchError if they cannot)."""

        def start_process(name: str) -> EngineProcess:
            made = self._start_process(name)
            with self._lock:
                is_cancelled = self._is_cancelled
                self._starting.get(number, []).append(made)  # not there: it is a successor
            if is_cancelled:
                made.kill()
                raise WorkbenchError("its start was cancelled")
            return made

        def pools(hear: Callable[[Event], None]) -> PrefillDecodePools:
            return PrefillDecodePools(config, listener=hear, processes=start_process, **self._options)

        with self._lock:
            self._starting[number] = []
        try:
            made = PoolsReplica(number, pools, lambda replica: self._started.remove(replica))
        finally:
            with self._lock:
                del self._starting[number]
        self._started.append(made)
        return made

    def cancel_starts(self) -> None:
        """Cancel starts in progress by killing their processes; no process starts after that."""
        with self._lock:
            self._is_cancelled = True
            found = [each for processes in self._starting.values() for each in processes]
        for each in found:
            each.end_soon()

    def close(self) -> None:
        """End all pools and wait for that."""
        left = tuple(self._started)  # `ended` removes entries
        for each in left:
            each.stop()
        for each in left:
            each.close()


class ProcessLauncher(PoolsLauncher):
    """Start replicas of one engine, which the front replaces.

    Args:
        cpus: threads of a replica; default: an equal share of this machine's cores.
        replicas: expected number of replicas.
        step_seconds: time limit of a step; then the replica is ended as lost. None for no limit.
    """

    def __init__(self, cpus: int | None, replicas: int, step_seconds: float | None = None):
        self._threads = cpus or max(1, (os.cpu_count() or 1) // max(1, replicas))
        options = {
            "num_decode": 0, "threads": self._threads, "replaces_dead": False, "step_seconds": step_seconds,
        }  # fmt: skip
        self._prepare(self.process, options)

    def process(self, name: str) -> EngineProcess:
        """Start the process of a replica: a child of this process."""
        return ChildProcess(name)
