"""Replicas in threads of this process: a cluster without Ray."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from tests.cluster.pool_threads import StartThreads
from workbench.cluster.pools import PrefillDecodePools
from workbench.cluster.pools_replica import PoolsReplica
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.trace.events import Finished

CONFIG = EngineConfig.build("demo", backend="eager", cache={"prefix": "radix"}, pages=120)


@cache
def demo() -> LoadedModel:
    return LoadedModel.load(CONFIG)


class ThreadReplica(PoolsReplica):
    """A replica whose engine is a thread, and whose death is a word."""

    def __init__(self, number: int, config: EngineConfig):
        start = StartThreads(lambda config: demo())
        super().__init__(
            number,
            lambda hear: PrefillDecodePools(config, 1, 0, processes=start, replaces_dead=False, listener=hear),
        )

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def die(self, why: str = "killed") -> None:
        self.pools._put(lambda: self.pools._died(self.pools.slots[0], why))


class Threads:
    """A launcher.

    Attributes:
        broken: why no further replica starts.
        room: replicas that start before it is broken.
        held: a start waits for it, or for `cancelled`; None: no start waits.
        entered: a start is under way.
        under_way: starts that are, and those that were when the launcher was closed.
    """

    def __init__(self) -> None:
        self.started: list[ThreadReplica] = []
        self.broken, self.room = "", 0
        self.held: threading.Event | None = None
        self.entered, self.cancelled = threading.Event(), threading.Event()
        self.under_way, self.under_way_at_close = 0, 0
        self._lock = threading.Lock()

    def start(self, number: int, config: EngineConfig) -> ThreadReplica:
        with self._lock:
            self.under_way += 1
        try:
            self.entered.set()
            if self.held is not None:
                self.held.wait()
                if self.cancelled.is_set():
                    raise WorkbenchError("cancelled")
            with self._lock:
                if self.broken and not self.room:
                    raise WorkbenchError(self.broken)
                self.room = max(0, self.room - 1)
            made = ThreadReplica(number, config)
            self.started.append(made)
            return made
        finally:
            with self._lock:
                self.under_way -= 1

    def replica(self, number: int) -> ThreadReplica:
        """Return the replica of a number: those that start together come into `started` in any order."""
        (found,) = (each for each in self.started if each.number == number)
        return found

    def cancel_starts(self) -> None:
        self.cancelled.set()
        if self.held is not None:
            self.held.set()

    def close(self) -> None:
        self.under_way_at_close = self.under_way
        for each in self.started:
            each.close()


ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


def alone(text: str) -> Finished:
    runner = Runner(CONFIG, demo())
    return next(iter(generate(runner, runner.make_requests(text, dict(ASKED))).values()))
