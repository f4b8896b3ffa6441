"""Run replicas as Ray actors: on a given cluster, or on one that is started on this machine.

front's process: a thread for each replica asks for reports ---> actor: engine, reports of its steps
                 submit, cancel (in order, not waited for) --->

A replica's death shows as an error of the request for reports that is always under way. Actors end with the process of
the front (see `front_watch`); Ray restarts none, since a new one has another number.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.cluster.front_watch import FrontWatch
from workbench.cluster.replica import PageCounts, ReadyReplica, ReplicaEngine, Report, fingerprint_of, tokens_in_cache
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError
from workbench.ray_start import import_ray, start_ray
from workbench.request import Request

POLL_SECONDS = 0.5  # that a replica without news waits before it says so
SILENT_SECONDS = 120.0  # without an answer from a replica's process until it is given up
CLOCK_QUESTIONS = 5
CONNECT_SECONDS = 10.0  # for a connection to a given cluster
READY_SECONDS = 600.0  # for a replica to load its model
OBJECT_STORE_BYTES = 100 * 2**20  # of the object store, which stays empty
SOCKET_FOLDER = "/tmp"  # paths of sockets have at most 107 bytes, and other folders for temporary files may be longer
GROUPS = {"control": 1, "poll": 1, "query": 1}  # threads of an actor; calls of one group are carried out in order


class ReplicaActor:
    """The actor of a replica. Its methods run in three threads, see `GROUPS`; the engine in one of its own."""

    def __init__(self, config: EngineConfig, threads: int):
        import torch

        from workbench.engine.runner import Runner

        torch.set_num_threads(threads)
        self._news = threading.Condition()
        self._reports: list[Report] = []
        self._runner = Runner(config, report=lambda line: print(line, file=sys.stderr))
        self._engine = ReplicaEngine(self._runner, self._put)

    def _put(self, report: Report) -> None:
        with self._news:
            self._reports.append(report)
            self._news.notify()

    def ready(self) -> ReadyReplica:
        """Return what the front needs to know of it."""
        pages = PageCounts.of_runner(self._runner)
        return ReadyReplica(
            pages, os.getpid(), fingerprint_of(self._runner), tokens_in_cache(self._runner), machine_id()
        )

    def now(self) -> float:
        """Return the time on the clock of its events."""
        return self._runner.clock()

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def poll(self) -> tuple[list[Report], float]:
        """Return the reports since the last call, and the seconds that the present step has lasted."""
        with self._news:
            self._news.wait_for(lambda: self._reports, POLL_SECONDS)
            reports, self._reports = self._reports, []
        return reports, self._engine.thread.busy_seconds()

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Return `function(runner)`, run between two steps."""
        return self._engine.thread.call(function)


class RayReplica:
    """The front's handle of an actor."""

    def __init__(self, number: int, ray: Any, actor: Any, ready: ReadyReplica, step_seconds: float | None):
        self.number, self.actor, self.ready = number, actor, ready
        self._ray, self._step_seconds = ray, step_seconds
        self.clock_ahead = 0.0  # seconds by which this process's clock is ahead of the replica's
        self.busy_seconds = 0.0
        self.is_stopped = False

    @property
    def process_id(self) -> int:
        return self.ready.process_id

    def submit(self, requests: Sequence[Request]) -> None:
        self.actor.submit.options(concurrency_group="control").remote(tuple(requests))

    def cancel(self, request_id: str) -> None:
        self.actor.cancel.options(concurrency_group="control").remote(request_id)

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Return `function(runner)`, run in the replica between two of its steps."""
        return self._ray.get(self.actor.call.options(concurrency_group="query").remote(function))

    def stop(self) -> None:
        self.is_stopped = True
        with suppress(Exception):  # its process, or the cluster, may be gone
            self._ray.kill(self.actor, no_restart=True)

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[str], None]) -> None:
        """Hear its reports until it is stopped or lost; for a thread of its own."""
        while not self.is_stopped:
            try:
                asked = self.actor.poll.options(concurrency_group="poll").remote()
                reports, self.busy_seconds = self._ray.get(asked, timeout=SILENT_SECONDS)
            except Exception as error:  # of any kind: it is lost
                if not self.is_stopped:
                    self.stop()
                    on_lost(f"replica {self.number}: {_first_line(error)}")
                return
            for report in reports:
                on_report(report if not self.clock_ahead else _later(report, self.clock_ahead))
            if self._step_seconds is not None and self.busy_seconds > self._step_seconds and not self.is_stopped:
                self.stop()
                on_lost(f"replica {self.number}: a step had not ended after {self.busy_seconds:.0f} s")
                return

    def compare_clocks(self, wait: Callable[[Any], Any]) -> None:
        """Find out how far its clock is behind, on another machine: by the quickest of a few questions.

        `wait` returns what an actor answers, or raises what keeps it from an answer."""
        found = []
        for _ in range(CLOCK_QUESTIONS):
            began = time.perf_counter()
            theirs = wait(self.actor.now.options(concurrency_group="query").remote())
            took = time.perf_counter() - began
            found.append((took, began + took / 2 - theirs))
        self.clock_ahead = min(found)[1]


@dataclass
class SharedRay:
    """Ray as the launchers of this process share it: the first one starts it, and the last one shuts it down.

    Attributes:
        lock: for the other fields, and for each start and end of Ray.
        users: launchers that are open.
        is_own: a launcher started Ray; otherwise it is the caller's, and stays.
        address: that the launcher gave which started it.
        watch: of the cluster that was started on this machine.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    users: int = 0
    is_own: bool = False
    address: str | None = None
    watch: FrontWatch | None = None

    def clean(self) -> None:
        """End what Ray left of a cluster that was started here, once Ray is shut down."""
        self.is_own = False
        if self.watch is not None:
            self.watch.close()
            self.watch = None


SHARED_RAY = SharedRay()


class RayLauncher:
    """Start replicas on Ray.

    Args:
        address: of a Ray cluster (`auto`, `ray://HOST:PORT`); None starts one on this machine, which ends with the last
            launcher of this process.
        cpus: cores of a replica, which are its threads; None: on this machine an equal share, elsewhere one.
        gpus: accelerators of a replica.
        replicas: about how many there will be.
        step_seconds: that a step may last; then the replica is ended as a lost one. None: any time.
    """

    def __init__(
        self, address: str | None, cpus: int | None, gpus: float, replicas: int, step_seconds: float | None = None
    ):
        self._ray = _import_ray()
        self._step_seconds = step_seconds
        self._is_closed = False
        self._is_cancelled = False
        self._threads = cpus or (1 if address else max(1, (os.cpu_count() or 1) // max(1, replicas)))
        # On a cluster of one's own nothing else asks for cores, and replicas may be more than cores.
        self._needs = {"num_cpus": self._threads if address else 0, "num_gpus": gpus}
        with SHARED_RAY.lock:
            if not self._ray.is_initialized():
                SHARED_RAY.clean()  # the caller shut down what an earlier launcher had started
                self._connect(address)
            elif address is not None and not (SHARED_RAY.is_own and SHARED_RAY.address == address):
                raise WorkbenchError("address: this process has a Ray cluster; leave it out or ray.shutdown()")
            SHARED_RAY.users += 1

    def _connect(self, address: str | None) -> None:
        if address is not None:
            check_reachable(address)
        before = signal.getsignal(signal.SIGTERM)  # which Ray replaces
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

    def start(self, number: int, config: EngineConfig) -> RayReplica:
        """Start a replica and wait until it can serve (WorkbenchError where it cannot)."""
        made = self._ray.remote(concurrency_groups=GROUPS, max_restarts=0, max_task_retries=0, **self._needs)
        actor = made(ReplicaActor).remote(config, self._threads)
        try:
            asked = actor.ready.options(concurrency_group="query").remote()
            ready = self._wait(asked)
            replica = RayReplica(number, self._ray, actor, ready, self._step_seconds)
            if ready.machine != machine_id():
                replica.compare_clocks(self._wait)
        except Exception as error:
            with suppress(Exception):
                self._ray.kill(actor, no_restart=True)
            cause = getattr(error, "cause", None) or error
            words = " ".join(str(cause).split())[-2000:]
            raise WorkbenchError(f"replica {number} did not start: {type(cause).__name__}: {words}") from error
        return replica

    def _wait(self, asked: Any) -> Any:
        """Return what an actor answers (TimeoutError after too long, WorkbenchError once starts are cancelled)."""
        ends = time.monotonic() + READY_SECONDS
        while not self._ray.wait([asked], timeout=POLL_SECONDS)[0]:
            if self._is_cancelled:
                raise WorkbenchError("the cluster was closed")
            if time.monotonic() > ends:
                raise TimeoutError(f"it cannot serve after {READY_SECONDS:.0f} s")
        return self._ray.get(asked)

    def cancel_starts(self) -> None:
        """Let starts that are under way end soon; their actors are killed."""
        self._is_cancelled = True

    def close(self) -> None:
        """Leave the cluster. One that was started here ends with its last launcher. Does nothing the second time."""
        with SHARED_RAY.lock:
            if self._is_closed:
                return
            self._is_closed = True
            SHARED_RAY.users -= 1
            if SHARED_RAY.is_own and not SHARED_RAY.users:
                self._ray.shutdown()
                SHARED_RAY.clean()


def machine_id() -> str:
    """Return a text that processes have in common which read the same clock: of the machine and its last start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return socket.gethostname()


def check_reachable(address: str) -> None:
    """Refuse an address where nothing listens, for which Ray would look for minutes (WorkbenchError)."""
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
    """Return an error's kind and the first line of its message, which may be empty."""
    return ": ".join((type(error).__name__, *str(error).splitlines()[:1])).removesuffix(": ")


def _later(report: Report, seconds: float) -> Report:
    """Return a report on the front's clock."""
    return report._replace(events=tuple(replace(event, time=event.time + seconds) for event in report.events))


def _import_ray() -> Any:
    try:
        return import_ray()
    except ImportError as error:
        raise WorkbenchError(f"a cluster needs Ray ({error}); pip install 'inference-workbench[cluster]'") from None
