"""Run points on this machine, each in its own process, so that compile caches and memory are clean."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from workbench.machine.environment import child_environment
from workbench.sweep.executor import worker_command
from workbench.sweep.point import LOG
from workbench.sweep.settings import LocalSweepConfig

POLL_SECONDS = 0.05  # seconds between polls of the workers
TERMINATE_SECONDS = 5.0  # seconds until a terminated worker is killed
THREADS_VARIABLE = "OMP_NUM_THREADS"


class LocalSweepExecutor:
    """Run up to `jobs` workers at once, dividing the processor's cores among them."""

    def __init__(self, setting: LocalSweepConfig) -> None:
        self.jobs = setting.jobs

    def run(self, points: Sequence[Path], on_end: Callable[[Path], None]) -> None:
        waiting = deque(points)
        running: dict[Path, subprocess.Popen] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    point = waiting.popleft()
                    running[point] = self._start(point)
                time.sleep(POLL_SECONDS)
                for point in [point for point, worker in running.items() if worker.poll() is not None]:
                    del running[point]
                    on_end(point)
        finally:
            _stop(list(running.values()))

    def _start(self, point: Path) -> subprocess.Popen:
        environment = child_environment()
        if self.jobs > 1:
            environment.setdefault(THREADS_VARIABLE, str(max(1, (os.cpu_count() or 1) // self.jobs)))
        with (point / LOG).open("ab") as log:
            return subprocess.Popen(
                worker_command(point), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )


def _stop(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(TERMINATE_SECONDS)
            continue
        worker.kill()
        worker.wait()
