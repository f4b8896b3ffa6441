"""Run replicas as Ray actors, on a given cluster or on one started on this machine.

An actor is a process like any other (`pools_replica`), which Ray places on a machine. Actors end with their
connection to the front's process, and a Ray started here with that process (see `front_watch`); Ray restarts none.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import tempfile
import threading
from contextlib import redirect_stdout
from dataclasses import dataclass, field

from workbench.cluster.apart.pool_processes import RayProcess
from workbench.cluster.front_watch import FrontWatch
from workbench.cluster.pools_replica import ProcessLauncher
from workbench.errors import WorkbenchError
from workbench.ray_start import import_ray, start_ray

CONNECT_SECONDS = 10.0  # time limit for connecting to a given cluster
OBJECT_STORE_BYTES = 100 * 2**20  # size of the object store, which stays empty
SOCKET_FOLDER = "/tmp"  # short, since a socket path has at most 107 bytes


@dataclass
class SharedRay:
    """The use of Ray by all launchers of this process: the first launcher starts Ray, the last one shuts it down.

    Attributes:
        lock: guards the other fields, and each start and shutdown of Ray.
        users: number of open launchers.
        is_own: whether a launcher started Ray; otherwise Ray belongs to the caller and stays.
        address: the address given by the launcher that started Ray.
        watch: the watcher of a cluster started on this machine.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    users: int = 0
    is_own: bool = False
    address: str | None = None
    watch: FrontWatch | None = None

    def clean(self) -> None:
        """Clean up a cluster started here, after Ray is shut down."""
        self.is_own = False
        if self.watch is not None:
            self.watch.close()
            self.watch = None


SHARED_RAY = SharedRay()


class RayLauncher(ProcessLauncher):
    """Start replicas on Ray.

    Args:
        address: address of a Ray cluster (`auto`, `ray://HOST:PORT`); None starts one on this machine, which ends with
            the last launcher of this process.
        cpus: cores and threads of a replica; None: an equal share on this machine, 1 elsewhere.
        gpus: accelerators of a replica.
        replicas: expected number of replicas.
        step_seconds: time limit of a step; then the replica is ended as lost. None for no limit.
    """

    def __init__(
        self, address: str | None, cpus: int | None, gpus: float, replicas: int, step_seconds: float | None = None
    ):
        super().__init__(cpus or (1 if address else None), replicas, step_seconds)
        self._ray = import_ray("a cluster")
        self._is_closed = False
        # On a cluster started here, only replicas use cores, and there may be more replicas than cores.
        self._needs = {"num_cpus": self._threads if address else 0, "num_gpus": gpus}
        with SHARED_RAY.lock:
            if not self._ray.is_initialized():
                SHARED_RAY.clean()  # the caller shut down an earlier launcher's Ray
                self._connect(address)
            elif address is not None and not (SHARED_RAY.is_own and SHARED_RAY.address == address):
                raise WorkbenchError("address: this process has a Ray cluster; omit address, or call ray.shutdown()")
            SHARED_RAY.users += 1

    def _connect(self, address: str | None) -> None:
        if address is not None:
            check_reachable(address)
        before = signal.getsignal(signal.SIGTERM)  # Ray replaces the handler
        try:
            with redirect_stdout(sys.stderr):
                self._init(address)
        except Exception as error:
            self._ray.shutdown()
            SHARED_RAY.clean()
            where = address or "this machine"
            hint = "; see whether it wants RAY_AUTH_MODE=token" * (address is not None)
            raise WorkbenchError(
                f"address: no Ray cluster can be used at {where} ({_first_line(error)}){hint}"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
        SHARED_RAY.is_own, SHARED_RAY.address = True, address

    def _init(self, address: str | None) -> None:
        common = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is not None:
            start_ray(self._ray, address=address, **common)
            return
        folder = tempfile.mkdtemp(prefix="ray-", dir=SOCKET_FOLDER)
        SHARED_RAY.watch = FrontWatch(folder)
        start_ray(
            self._ray, address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder, **common,
        )  # fmt: skip

    def process(self, name: str) -> RayProcess:
        """Start the actor of a replica."""
        return RayProcess(name, **self._needs, is_cancelled=lambda: self._is_cancelled)

    def close(self) -> None:
        """End all replicas and leave the cluster. A cluster started here ends with its last launcher."""
        super().close()
        with SHARED_RAY.lock:
            if self._is_closed:
                return
            self._is_closed = True
            SHARED_RAY.users -= 1
            if SHARED_RAY.is_own and not SHARED_RAY.users:
                self._ray.shutdown()
                SHARED_RAY.clean()


def check_reachable(address: str) -> None:
    """Raise WorkbenchError for an address without a listener, which Ray would try for minutes."""
    if address in ("auto", "local"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise WorkbenchError(f"address: {address!r}; give HOST:PORT, ray://HOST:PORT or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise WorkbenchError(f"address: no Ray cluster can be used at {address} ({error})") from None


def _first_line(error: Exception) -> str:
    """Return an error's type name and the first line of its message, which may be empty."""
    return ": ".join((type(error).__name__, *str(error).splitlines()[:1])).removesuffix(": ")
