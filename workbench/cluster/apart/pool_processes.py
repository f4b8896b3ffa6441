"""Start the process of an engine: a child of this one, or a Ray actor. Either way it talks over one connection, which
ends with it, and it ends with the connection."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

from workbench.cluster.apart.pool_engine import run_engine
from workbench.errors import WorkbenchError, describe_error


class EngineProcess(Protocol):
    """The process of an engine; `pid` is None where it runs on another host."""

    connection: Connection

    @property
    def pid(self) -> int | None: ...

    def kill(self) -> None:
        """End it at once, and wait until it has ended."""
        ...


START_SECONDS = 120.0  # for an actor to be there, and to call back
StartProcess = Callable[[str], EngineProcess]  # by a name that errors show


class ChildProcess:
    """An engine in a child of this process."""

    def __init__(self, name: str):
        mine, its = socket.socketpair()
        with its:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "workbench.cluster.apart.pool_engine", str(its.fileno())],
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
        self._fd: int | None = None  # of its process, where it is on this host
        self._actor = ray.remote(num_cpus=0, max_restarts=0)(_Actor).remote()
        try:
            self.pid, there = ray.get(self._actor.whereabouts.remote(), timeout=START_SECONDS)
            if there != ray.get_runtime_context().get_node_id():
                self.pid = None
            elif hasattr(os, "pidfd_open"):  # Linux
                self._fd = os.pidfd_open(self.pid)
            with socket.create_server((host_address(), 0)) as server:
                server.settimeout(START_SECONDS)
                self._actor.run.remote(server.getsockname(), key)
                its, _ = server.accept()
            with its:
                _keep_alive(its)
                self.connection = Connection(os.dup(its.fileno()))
                with limited_reads(its, START_SECONDS):
                    deliver_challenge(self.connection, key)
                    answer_challenge(self.connection, key)
        except BaseException as error:
            self._end()
            if isinstance(error, Exception):
                raise WorkbenchError(f"processes: {name} did not start in Ray: {describe_error(error)}") from error
            raise

    def kill(self) -> None:
        self.connection.close()
        self._end()

    def _end(self) -> None:
        self._ray.kill(self._actor)
        if self._fd is not None:  # what it computes on pages of a shared memory must have ended
            fd, self._fd = self._fd, None
            try:
                end_process(fd, self.name)
            finally:
                os.close(fd)


def end_process(fd: int, name: str) -> None:
    """End the process of a pidfd, and wait until it has ended.

    Raises:
        WorkbenchError: if it lives on, so that no other process may write to its pages.
    """
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    if not select.select([fd], [], [], START_SECONDS)[0]:
        raise WorkbenchError(f"{name}: its process lives {START_SECONDS:g} s after SIGKILL and may write to its pages")


@contextlib.contextmanager
def limited_reads(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Let each read of a connection end with an OSError after so long meanwhile, by any descriptor of it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(int(seconds * 1e6), 10**6)))
    try:
        yield
    finally:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def host_address() -> str:
    """Return the address of this host in the Ray cluster."""
    import ray  # optional

    return ray.util.get_node_ip_address()


def _keep_alive(connection: socket.socket) -> None:
    """End a connection soon after the other host has vanished, which says nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Actor:
    """The actor of an engine."""

    def whereabouts(self) -> tuple[int, str]:
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id()

    def run(self, address: Any, key: bytes) -> None:
        connection = Client(address, authkey=key)
        with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as its:
            _keep_alive(its)
        run_engine(connection, host=host_address())


STARTERS: dict[str, StartProcess] = {"child": ChildProcess, "ray": RayProcess}
