"""Start the process of an engine: a child of this one, or a Ray actor. Either way it talks over one connection, which
ends with it, and it ends with the connection."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

from workbench.cluster.pool_engine import run_engine
from workbench.errors import WorkbenchError


class EngineProcess(Protocol):
    """The process of an engine; `pid` is None where it runs on another host."""

    connection: Connection
    pid: int | None

    def kill(self) -> None:
        """End it at once, and wait until it has ended."""
        ...


StartProcess = Callable[[str], EngineProcess]  # by a name that errors show


class ChildProcess:
    """An engine in a child of this process."""

    def __init__(self, name: str):
        mine, its = socket.socketpair()
        with its:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "workbench.cluster.pool_engine", str(its.fileno())],
                pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is the coordinator's
            )  # fmt: skip
        self.name, self.pid = name, self._child.pid
        self.connection = Connection(mine.detach())

    def kill(self) -> None:
        self.connection.close()
        with contextlib.suppress(OSError):
            self._child.kill()
        self._child.wait()


class RayProcess:
    """An engine in a Ray actor of one CPU, on any host of the cluster that this process is part of."""

    def __init__(self, name: str):
        try:
            import ray  # optional
        except ImportError:
            raise WorkbenchError("processes: ray is not installed; install ray, or set processes: child") from None
        if not ray.is_initialized():
            raise WorkbenchError("processes: ray is not started; call ray.init() first, or set processes: child")
        self._ray, self.name = ray, name
        key = secrets.token_bytes(16)
        with Listener((host_address(), 0), authkey=key) as listener:
            self._actor = ray.remote(num_cpus=0, max_restarts=0)(_Actor).remote()
            self.pid, there = ray.get(self._actor.whereabouts.remote())
            if there != ray.get_runtime_context().get_node_id():
                self.pid = None
            self._actor.run.remote(listener.address, key)
            self.connection: Connection = listener.accept()

    def kill(self) -> None:
        self.connection.close()
        self._ray.kill(self._actor)


def host_address() -> str:
    """Return the address of this host in the Ray cluster."""
    import ray  # optional

    return ray.util.get_node_ip_address()


class _Actor:
    """The actor of an engine."""

    def whereabouts(self) -> tuple[int, str]:
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id()

    def run(self, address: Any, key: bytes) -> None:
        run_engine(Client(address, authkey=key))


STARTERS: dict[str, StartProcess] = {"child": ChildProcess, "ray": RayProcess}
