"""Engines of pools in threads, which die when a message is sent: the coordinator, the engines, the memory and the
connections are the real ones, so that thousands of deaths are tried in little time."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from workbench.cluster.apart.pool_engine import PoolEngine, run_engine
from workbench.cluster.apart.pool_messages import Stop
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel


class MortalConnection:
    """A connection whose process dies at its message of this number, before it is sent or right after. From `hang` to
    `go_on` it is as one of a process that was stopped: nothing is read or sent."""

    def __init__(self, inner: Connection, dies_at: int | None, says_it: bool):
        self.inner, self.left, self.says_it = inner, dies_at, says_it
        self.is_immortal = False
        self._goes_on = threading.Event()
        self._goes_on.set()

    def hang(self) -> None:
        """Stop at the next message, in either direction; what is read already is lost at the process's end."""
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    @property
    def is_dying(self) -> bool:
        return self.left is not None and self.left < 0

    def recv(self) -> Any:
        select.select([self.inner], [], [])
        self._goes_on.wait()
        return self.inner.recv()

    def send(self, message: object) -> None:
        self._goes_on.wait()
        if self.left is not None and not self.is_immortal:
            self.left -= 1
            if self.is_dying:
                if self.says_it:
                    self.inner.send(message)
                raise EOFError
        self.inner.send(message)


class ThreadProcess:
    """An engine in a thread; `pid` is None, since it has no process of its own."""

    pid = None

    def __init__(self, load: Callable[[EngineConfig], LoadedModel], dies_at: int | None, says_it: bool):
        self.connection, its = Pipe()
        self.engine: PoolEngine | None = None
        self.mortal = mortal = MortalConnection(its, dies_at, says_it)

        def run() -> None:
            try:
                self.engine = run_engine(mortal, load, lambda engine: engine.inbox.put(Stop()))  # type: ignore[arg-type]
            finally:
                with socket.fromfd(its.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ended:
                    ended.shutdown(socket.SHUT_RDWR)  # and not closed: a thread of the engine still reads

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def end_soon(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.connection.close()
        self.mortal.go_on()
        self._thread.join()


class StartThreads:
    """Start engines of one model in threads.

    Args:
        load: returns the model.
        deaths: by name of a place, (number of a message, whether it is sent) at which its engines die, one after
            another; further ones live.
    """

    def __init__(
        self, load: Callable[[EngineConfig], LoadedModel], deaths: dict[str, list[tuple[int, bool]]] | None = None
    ):
        self.load, self.deaths = load, deaths or {}
        self.living: dict[str, ThreadProcess] = {}
        self.num_started = 0
        self.is_immortal = False

    def spare(self) -> None:
        """Let no more engine die, but those that do already."""
        self.deaths, self.is_immortal = {}, True
        for each in list(self.living.values()):
            each.mortal.is_immortal = True

    def __call__(self, name: str) -> ThreadProcess:
        left = self.deaths.get(name)
        dies_at, says_it = left.pop(0) if left else (None, False)
        self.num_started += 1
        self.living[name] = ThreadProcess(self.load, dies_at, says_it)
        self.living[name].mortal.is_immortal = self.is_immortal
        return self.living[name]
