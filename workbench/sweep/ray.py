"""Run points on a Ray cluster: a given one, or one started on this machine for the sweep.

Each point is a task with a child process that ends with the worker. The task returns an exit code; all results are in
the point's folder. Ray itself retries no point: a worker's death is reported, as by any executor.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.ray_start import import_ray, start_ray
from workbench.sweep import bound
from workbench.sweep.point import LOG, OUTCOME
from workbench.sweep.settings import RaySweepConfig

OBJECT_STORE_BYTES = 100 * 2**20  # size of the object store, which stays empty
FILE_TIMEOUT_SECONDS = 90.0  # seconds until a network file system shows another node's writes
SOCKET_FOLDER = "/tmp"  # short, since a socket path has at most 107 bytes


class RaySweepExecutor:
    """Run as many points at once as fit the cluster, each with the setting's `cpus` cores and `gpus` accelerators."""

    def __init__(self, setting: RaySweepConfig) -> None:
        self.setting = setting
        self.ray = import_ray("executor ray")

    def run(self, points: Sequence[Path], on_end: Callable[[Path], None]) -> None:
        with redirect_stdout(sys.stderr), self._cluster() as cpus:  # Ray prints deaths to stdout
            task = self._task(cpus)
            running: dict[Any, Path] = {task.remote(*bound.worker_arguments(point)): point for point in points}
            try:
                while running:
                    (done,), _ = self.ray.wait(list(running), num_returns=1)
                    # Ray aborts this process if a task is cancelled just as it ends: remove a finished task first.
                    point = running.pop(done)
                    self._check_worker(done, point)
                    on_end(point)
            finally:
                for left in running:
                    self.ray.cancel(left, force=True)

    def _check_worker(self, done: Any, point: Path) -> None:
        """Write a worker's death to the point's log; raise WorkbenchError for errors that the user must fix."""
        try:
            if self.ray.get(done) == 0:
                _wait_for_file(point / OUTCOME)
        except self.ray.exceptions.RayTaskError as error:
            raise WorkbenchError(
                f"ray: a worker cannot run {point} ({error.cause}); the folder of the sweep must be at the same "
                "path on every node, as shared storage is"
            ) from error
        except self.ray.exceptions.RayError as error:
            with (point / LOG).open("a", encoding="utf-8") as log:
                log.write(f"ray: {type(error).__name__}: {str(error).splitlines()[0]}\n")

    def _task(self, cpus: int) -> Any:
        need = {"CPU": cpus, "GPU": self.setting.gpus}
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= amount for name, amount in need.items()) for node in nodes):
            most = {name: max(node.get(name, 0) for node in nodes) for name in need}
            raise WorkbenchError(
                f"executor: a point asks for {cpus} cpus and {self.setting.gpus:g} gpus, and no node of the cluster "
                f"has them (at most {most['CPU']:g} and {most['GPU']:g}); lower executor.cpus or executor.gpus"
            )
        self.ray.cloudpickle.register_pickle_by_value(bound)  # only a worker's child needs the workbench installed
        options = {"num_cpus": cpus, "num_gpus": self.setting.gpus, "max_retries": 0}
        return self.ray.remote(**options)(bound.run_child)

    def _start(self, **options: Any) -> None:
        """Start or join a cluster. Ray raises a plain Exception if a node does not start in time."""
        try:
            start_ray(self.ray, **options)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise WorkbenchError(
                f"executor ray: no node started ({' '.join(str(error).split())}); where the machine is busy with "
                "something else, resume the sweep later"
            ) from error

    @contextmanager
    def _cluster(self) -> Iterator[int]:
        """Stay connected to a cluster, and yield the number of cores per point.

        A cluster started here is shut down at the end.
        """
        setting, cpus = self.setting, self.setting.cpus
        if self.ray.is_initialized():  # started by the caller, who shuts it down
            if setting.address is not None:
                raise WorkbenchError("executor: this process has a Ray cluster; omit address, or call ray.shutdown()")
            yield cpus or 1
            return
        folder = None
        common = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            with _keep_signal_handlers():
                if setting.address is not None:
                    cpus = cpus or 1
                    self._start(address=setting.address, **common)
                else:
                    cpus = cpus or max(1, (os.cpu_count() or 1) // setting.workers)
                    folder = tempfile.mkdtemp(prefix="ray-", dir=SOCKET_FOLDER)
                    self._start(
                        address="local", num_cpus=setting.workers * cpus, include_dashboard=False,
                        object_store_memory=OBJECT_STORE_BYTES, _temp_dir=folder, **common,
                    )  # fmt: skip
            yield cpus
        except (ConnectionError, self.ray.exceptions.RaySystemError) as error:
            where = setting.address or "this machine"
            reason = str(error).splitlines()[0]
            raise WorkbenchError(
                f"executor.address: no Ray cluster can be used at {where} ({reason}); check that it runs, and if it "
                "needs RAY_AUTH_MODE=token"
            ) from error
        finally:
            self.ray.shutdown()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def _wait_for_file(file: Path) -> None:
    deadline = time.monotonic() + FILE_TIMEOUT_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        os.listdir(file.parent)  # makes a network file system refresh
        time.sleep(0.1)


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces when it starts."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
