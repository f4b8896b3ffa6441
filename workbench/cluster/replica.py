"""Run one engine of a cluster: take requests, and report what happened, one message a step.

front: submit, cancel ---> replica: its runner's thread ---> reports: events of a step, pages ---> front
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.files import without_own_paths
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished

SAMPLES_OF_A_TENSOR = 256  # weights of each tensor that a fingerprint reads


class PageCounts(NamedTuple):
    """Pages of all cache groups: held by requests, idle (of the prefix cache alone), and free."""

    used: int = 0
    idle: int = 0
    free: int = 0

    @classmethod
    def of_runner(cls, runner: Runner) -> PageCounts:
        """Return the counts of a runner, between two of its steps."""
        pools = runner.kv_cache.manager.pools
        idle, free = sum(len(pool.evictable) for pool in pools), sum(pool.num_free for pool in pools)
        return cls(sum(pool.num_pages for pool in pools) - idle - free, idle, free)

    def plus(self, other: PageCounts) -> PageCounts:
        return PageCounts(*(mine + its for mine, its in zip(self, other, strict=True)))


class ReadyReplica(NamedTuple):
    """A replica that can serve: its pages, its process, a text that says weights and settings, its cache's room, and
    the machine whose clock it reads."""

    pages: PageCounts
    process_id: int
    fingerprint: str
    cache_tokens: int
    machine: str = ""


def tokens_in_cache(runner: Runner) -> int:
    """Return how many tokens the cache of a runner has room for, by its largest group."""
    return runner.config.cache.page_size * max(pool.num_pages for pool in runner.scheduler.pools)


def fingerprint_of(runner: Runner, config: EngineConfig | None = None) -> str:
    """Return a text that differs where the same tokens may be answered differently: of settings (the runner's unless
    given), sampled weights and calibrated codecs."""
    found = hashlib.sha256(repr(config or runner.config).encode())
    for name, tensor in runner.model.state_dict().items():
        flat = tensor.detach().flatten()
        step = max(1, flat.numel() // SAMPLES_OF_A_TENSOR)
        found.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        found.update(flat[::step].contiguous().float().cpu().numpy().tobytes())
    for tensor in runner.store.codec_tensors:
        found.update(tensor.detach().contiguous().float().cpu().numpy().tobytes())
    return f"fp_{found.hexdigest()[:12]}"


class Report(NamedTuple):
    """One message of a replica: all events of a step and of what came before it, in order, and the pages after it.

    `error`: why the engine gave up all that it had, if it did."""

    events: tuple[Event, ...]
    pages: PageCounts
    error: str = ""


class Replica(Protocol):
    """A front's handle of an engine. No call waits; what came of it is in the replica's reports, or it is lost.

    `number` is never used again for another. Calls are carried out in order.
    """

    @property
    def number(self) -> int: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Serve `requests`, whose ids differ from those of all that it serves."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a request with all its samples; an unknown one is ignored."""
        ...

    def stop(self) -> None:
        """End the engine and its process now, with whatever it still has."""
        ...


class ReplicaEngine:
    """The engine of a replica, in the replica's process. `deliver` is called in the runner's thread, once a step."""

    def __init__(self, runner: Runner, deliver: Callable[[Report], None]):
        self._runner, self._deliver = runner, deliver
        self._events: list[Event] = []
        self._error = ""
        self._cancels: dict[str, Callable[[], None]] = {}
        self.thread = RunnerThread.attach(runner)
        self._leave = [self.thread.listen(self._events.append), self.thread.after_delivery(self._flush)]

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests, each of which can be cancelled by its id."""
        for request in requests:
            name = request.request_id
            self._cancels[name] = self.thread.submit_to(_EndSink(self, name), [request])

    def cancel(self, request_id: str) -> None:
        """Cancel a request soon; an unknown one is ignored."""
        cancel = self._cancels.pop(request_id, None)
        if cancel is not None:
            cancel()

    def close(self) -> None:
        """Cancel everything soon and report no more."""
        for leave in self._leave:
            leave()
        self.thread.stop()

    def _flush(self) -> None:
        if self._events:
            events, error = tuple(map(_for_other_machines, self._events)), self._error
            self._events.clear()
            self._error = ""
            self._deliver(Report(events, PageCounts.of_runner(self._runner), error))

    def _end(self, name: str, error: str) -> None:
        """Note the end of a request, and the error where the engine gave up all that it had."""
        self._cancels.pop(name, None)
        self._error = self._error or error


def _for_other_machines(event: Event) -> Event:
    """Return an event without paths of this process in the words of a refusal, which a client reads: no front knows
    them."""
    if not isinstance(event, Finished) or event.reason != FinishReason.REFUSED:
        return event
    return replace(event, error=without_own_paths(event.error))


class _EndSink:
    """Tell the engine of the end of a request, whose events leave by the listener."""

    def __init__(self, engine: ReplicaEngine, name: str):
        self._engine, self._name = engine, name

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        if done:
            self._engine._end(self._name, error)
