"""Start the replicas of a cluster, and hear and ask them in threads that end before the launcher does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from workbench.cluster.replica import Replica, Report
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError

CLOSED = "the cluster was closed"


class StartedReplica(Replica, Protocol):
    """A replica that can serve, in a process or a thread of its own."""

    @property
    def ready(self) -> Any: ...

    @property
    def busy_seconds(self) -> float: ...

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[str], None]) -> None:
        """Hear its reports until it is stopped or lost; for a thread of its own."""
        ...

    def call(self, function: Callable[[Any], Any]) -> Any: ...


class Launcher(Protocol):
    """A launcher of replicas: processes of this machine (`process_replicas.ProcessLauncher`), or Ray's."""

    def start(self, number: int, config: EngineConfig) -> StartedReplica:
        """Start a replica and wait until it can serve (WorkbenchError where it cannot)."""
        ...

    def cancel_starts(self) -> None:
        """Let starts that are under way end soon, where they can be cancelled; no other will come."""
        ...

    def close(self) -> None:
        """End everything. Nothing starts, and no replica is asked, while or after it is called."""
        ...


class LauncherThreads:
    """A launcher and the threads that use it. `close` waits for them: Ray exits the process where one still uses it."""

    def __init__(self, launcher: Launcher):
        self.launcher = launcher
        self._users, self._is_closed = 0, False
        self._changed = threading.Condition()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Put off the launcher's end meanwhile (WorkbenchError after `close`)."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def begin(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Begin work with the launcher or a replica in a thread of its own (WorkbenchError after `close`)."""
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
