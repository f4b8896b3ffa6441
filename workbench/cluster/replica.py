"""Describe one replica of a cluster: what it can serve, how a front speaks to it, and what it reports.

front: submit, cancel ---> replica: its engine ---> reports: events of a step, pages ---> front
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner
from workbench.files import without_own_paths
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished

SAMPLES_OF_A_TENSOR = 256  # weights that a fingerprint samples from each tensor


class PageCounts(NamedTuple):
    """Page counts over all cache groups: held by requests, idle (held by the prefix cache alone), and free."""

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
    """A replica that can serve: its pages, its processes on this machine, its fingerprint of weights and settings, and
    the size of its cache in tokens."""

    pages: PageCounts
    process_ids: tuple[int, ...]
    fingerprint: str
    cache_tokens: int


def tokens_in_cache(runner: Runner) -> int:
    """Return the size of a runner's cache in tokens: that of its largest cache group."""
    return runner.config.cache.page_size * max(pool.num_pages for pool in runner.scheduler.pools)


def fingerprint_of(runner: Runner, config: EngineConfig | None = None) -> str:
    """Return a text that differs if two engines may answer the same tokens differently. It covers settings (`config`;
    default: the runner's), sampled weights and calibrated codecs.
    """
    found = hashlib.sha256(repr(config or runner.config).encode())
    for name, tensor in runner.model.state_dict().items():
        flat = tensor.detach().flatten()
        step = max(1, flat.numel() // SAMPLES_OF_A_TENSOR)
        found.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        found.update(flat[::step].contiguous().float().cpu().numpy().tobytes())
    for tensor in runner.store.codec_tensors:
        found.update(tensor.detach().contiguous().float().cpu().numpy().tobytes())
    return f"fp_{found.hexdigest()[:12]}"


def combine_fingerprints(prints: Iterable[str]) -> str:
    """Return one fingerprint for several engines: their own if they have the same, else a hash of all."""
    found = sorted(set(prints))
    return found[0] if len(found) == 1 else f"fp_{hashlib.sha256(repr(found).encode()).hexdigest()[:12]}"


class Report(NamedTuple):
    """One message of a replica: the events up to and including a step, in order, and the counts of pages after the
    step.
    """

    events: tuple[Event, ...]
    pages: PageCounts


class Replica(Protocol):
    """The front's interface to a replica. Calls do not block; their results come in the replica's reports, unless the
    replica is lost.

    `number` is never reused. Calls run in order.
    """

    @property
    def number(self) -> int: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Serve `requests`; their ids must differ from those of all its current requests."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a request with all its samples; an unknown id is ignored."""
        ...

    def stop(self) -> None:
        """End the engine and its process now, with its remaining requests."""
        ...


def for_clients(event: Event) -> Event:
    """Return the event as a client may read it: the error of a refused request loses this process's paths, unknown to
    fronts.
    """
    if not isinstance(event, Finished) or event.reason != FinishReason.REFUSED:
        return event
    return replace(event, error=without_own_paths(event.error))
