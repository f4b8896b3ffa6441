"""Replicas in threads of this process: a cluster without Ray."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from workbench.cluster.ray_replicas import ReadyReplica
from workbench.cluster.replica import PageCounts, ReplicaEngine, Report, tokens_in_cache
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.request import Request
from workbench.trace.events import Finished

CONFIG = EngineConfig.build("demo", backend="eager", cache={"prefix": "radix"}, pages=120)


@cache
def demo() -> LoadedModel:
    return LoadedModel.load(CONFIG)


class ThreadReplica:
    """A replica whose death is a word in its queue."""

    def __init__(self, number: int, config: EngineConfig):
        self.number, self.is_stopped, self.busy_seconds = number, False, 0.0
        self._reports: queue.Queue[Report | str] = queue.Queue()
        self.runner = Runner(config, demo())
        self.engine = ReplicaEngine(self.runner, self._reports.put)
        name = f"fp_{config.schedule.max_num_seqs}"
        self.ready = ReadyReplica(PageCounts.of_runner(self.runner), 0, name, tokens_in_cache(self.runner))

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)

    def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            self.engine.close()
            self._reports.put("")

    def die(self, why: str = "killed") -> None:
        self.engine.close()
        self._reports.put(why)

    def call(self, function: Callable[[Any], Any]) -> Any:
        return self.engine.thread.call(function)

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[str], None]) -> None:
        while True:
            report = self._reports.get()
            if isinstance(report, str):
                if report:
                    on_lost(report)
                return
            on_report(report)


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
            each.stop()


ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


def alone(text: str) -> Finished:
    runner = Runner(CONFIG, demo())
    return next(iter(generate(runner, runner.make_requests(text, dict(ASKED))).values()))
