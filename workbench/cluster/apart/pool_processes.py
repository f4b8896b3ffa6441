"""Start the process of an engine: a child process or a Ray actor. Either has one connection, and process and connection
end together."""

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
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any, Protocol

from workbench.cluster.apart.pool_engine import run_engine
from workbench.errors import WorkbenchError, describe_error


class EngineProcess(Protocol):
    """The process of an engine; `pid` is None if it runs on another host."""

    connection: Connection

    @property
    def pid(self) -> int | None: ...

    def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        ...

    def end_soon(self) -> None:
        """Kill the process without waiting: its connection ends. Any thread may call it."""
        ...


PLACE_SECONDS = 600.0  # time limit for Ray to start an actor
POLL_SECONDS = 0.5  # interval of checks that an actor is still to start
START_SECONDS = 120.0  # time limit for an actor to call back, and for a process to end
StartProcess = Callable[[str], EngineProcess]  # takes a name for error messages


class ChildProcess:
    """An engine in a child of this process."""

    def __init__(self, name: str):
        mine, its = socket.socketpair()
        with its:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "workbench.cluster.apart.pool_engine", str(its.fileno())],
                pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal reaches the coordinator only
            )  # fmt: skip
        self.name, self.pid = name, self._child.pid
        self.connection = Connection(mine.detach())

    def kill(self) -> None:
        self.connection.close()
        self.end_soon()
        self._child.wait()

    def end_soon(self) -> None:
        with contextlib.suppress(OSError):
            self._child.kill()


class RayProcess:
    """An engine in a Ray actor, on any host of the cluster that this process is part of.

    Args:
        name: name for error messages.
        num_cpus: cores that Ray reserves for it.
        num_gpus: accelerators that Ray assigns to it.
        is_cancelled: called repeatedly until the actor has called back; True ends the start with an error.
    """

    def __init__(
        self, name: str, num_cpus: float = 0, num_gpus: float = 0, is_cancelled: Callable[[], bool] = lambda: False
    ):
        try:
            import ray  # optional
        except ImportError:
            raise WorkbenchError("processes: ray is not installed; install ray, or set processes: child") from None
        if not ray.is_initialized():
            raise WorkbenchError("processes: ray is not started; call ray.init() first, or set processes: child")

        def wait_until(is_done: Callable[[], object], seconds: float, problem: str) -> None:
            ends = time.monotonic() + seconds
            while not is_done():
                if is_cancelled() or time.monotonic() > ends:
                    raise WorkbenchError("its start was cancelled" if is_cancelled() else problem)

        self._ray, self.name = ray, name
        key = secrets.token_bytes(16)
        self._fd: int | None = None  # pidfd of the process, if it runs on this host
        self._actor = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0)(_Actor).remote()
        try:
            place = self._actor.whereabouts.remote()
            wait_until(lambda: ray.wait([place], timeout=POLL_SECONDS)[0], PLACE_SECONDS, "Ray has no place for it")
            self.pid, there = ray.get(place)
            if there != process_space():  # Ray's ids of nodes do not say it: a client's is the one of its server
                self.pid = None
            elif hasattr(os, "pidfd_open"):  # Linux
                self._fd = os.pidfd_open(self.pid)
            with socket.create_server((host_address(), 0)) as server:
                self._actor.run.remote(server.getsockname(), key)
                wait_until(lambda: wait([server], POLL_SECONDS), START_SECONDS, "its actor did not call back")
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

    def end_soon(self) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.kill(self._actor)

    def _end(self) -> None:
        self.end_soon()
        if self._fd is not None:  # it must not write to shared pages any more
            fd, self._fd = self._fd, None
            try:
                end_process(fd, self.name)
            finally:
                os.close(fd)


def process_space() -> tuple[str, str]:
    """Return (boot id of the machine, namespace of process ids): processes with the same pair know one another by
    process id.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        return socket.gethostname(), ""


def end_process(fd: int, name: str) -> None:
    """Kill the process that the pidfd `fd` refers to, and wait until it has ended.

    Raises:
        WorkbenchError: if it does not end: no other process may then write to its pages.
    """
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    if not select.select([fd], [], [], START_SECONDS)[0]:
        raise WorkbenchError(f"{name}: its process survived SIGKILL for {START_SECONDS:g} s and may write to its pages")


@contextlib.contextmanager
def limited_reads(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Limit each read from the socket `connection` to `seconds` within the block; a longer read raises OSError."""
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
    """Turn on TCP keepalive, so that the connection ends soon after the other host vanishes silently."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Actor:
    """The actor of an engine."""

    def whereabouts(self) -> tuple[int, tuple[str, str]]:
        return os.getpid(), process_space()

    def run(self, address: Any, key: bytes) -> None:
        connection = Client(address, authkey=key)
        with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as its:
            _keep_alive(its)
        run_engine(connection, host=host_address())


STARTERS: dict[str, StartProcess] = {"child": ChildProcess, "ray": RayProcess}
