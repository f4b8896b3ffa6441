"""Start the replicas of a cluster, and talk to them in threads that end before the launcher does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from workbench.cluster.replica import Replica, Report
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError

CLOSED = "the cluster was closed"
MAX_FAILED_STARTS = 3  # consecutive failed starts of successors, after which none follows at once
FIRST_PAUSE, MAX_PAUSE = 5.0, 60.0  # seconds before the next start, doubled each time


def pause_before_start(failed_starts: int, others_serve: bool) -> float | None:
    """Return the seconds to wait before a lost replica or engine is started again; None if it is not started again.

    Args:
        failed_starts: number of starts in a row that failed since it was lost.
        others_serve: whether other replicas or engines serve, or soon will, while it is missing.
    """
    if failed_starts < MAX_FAILED_STARTS:
        return 0.0
    return min(MAX_PAUSE, FIRST_PAUSE * 2 ** (failed_starts - MAX_FAILED_STARTS)) if others_serve else None


def is_longest_pause(failed_starts: int) -> bool:
    """Return whether the pause after so many failed starts is the longest: others then do not rely on the next one."""
    return pause_before_start(failed_starts, True) == MAX_PAUSE


class StartedReplica(Replica, Protocol):
    """A replica that can serve, in its own process or thread."""

    @property
    def ready(self) -> Any: ...

    @property
    def busy_seconds(self) -> float: ...

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[str], None]) -> None:
        """Receive the replica's reports until it is stopped or lost. Call it in a separate thread."""
        ...

    def call(self, function: Callable[[Any], Any]) -> Any: ...


class Launcher(Protocol):
    """The interface of launchers of replicas: processes of this machine (`pools_replica.ProcessLauncher`), or actors of
    Ray.
    """

    def start(self, number: int, config: EngineConfig) -> StartedReplica:
        """Start a replica and wait until it can serve (WorkbenchError if it cannot)."""
        ...

    def cancel_starts(self) -> None:
        """Cancel starts in progress where possible; no further starts follow."""
        ...

    def close(self) -> None:
        """End all replicas. No replica may be started or called during or after this call."""
        ...


class LauncherThreads:
    """A launcher, and the threads that use it. `close` waits for these threads, since Ray exits the process if a thread
    still uses it.
    """

    def __init__(self, launcher: Launcher):
        self.launcher = launcher
        self._users, self._is_closed = 0, False
        self._changed = threading.Condition()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the launcher open within the `with` block (WorkbenchError after `close`)."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def begin(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Run `work`, which uses the launcher or a replica, in a new thread (WorkbenchError after `close`)."""
        self._enter()

        def run() -> None:
            try:
                work()
            finally:
                self._leave()

        made = threading.Thread(target=run, name=name, daemon=True)
        try:
            made.start()
        except BaseException:
            self._leave()
            raise
        return made

    def close(self, stop_replicas: Callable[[], object]) -> None:
        """Cancel starts, call `stop_replicas`, wait until no thread uses the launcher, and close it."""
        with self._changed:
            self._is_closed = True
        self.launcher.cancel_starts()
        stop_replicas()
        with self._changed:
            self._changed.wait_for(lambda: not self._users)
        self.launcher.close()

    def _enter(self) -> None:
        with self._changed:
            if self._is_closed:
                raise WorkbenchError(CLOSED)
            self._users += 1

    def _leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._changed.notify_all()
