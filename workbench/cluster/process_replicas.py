"""Run replicas as child processes of this machine: each is a pool of one engine, which is lost with its process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from workbench.cluster.pools import PrefillDecodePools
from workbench.cluster.pools_replica import PoolsLauncher, PoolsReplica
from workbench.engine.config import EngineConfig


class ProcessReplica(PoolsReplica):
    """The front's handle of a child process; `process_id` is None once it has ended."""

    @property
    def process_id(self) -> int | None:
        process = self.pools.slots[0].process
        return None if process is None else process.pid

    @property
    def lost_by(self) -> str:
        return self.pools.error or ("its process has ended" if self.pools.slots[0].state == "gone" else "")

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Return `function(runner)`, run in the replica between two of its steps."""
        return self.pools.call_engine(0, function)


class ProcessLauncher(PoolsLauncher):
    """Start replicas in child processes.

    Args:
        cpus: threads of a replica; an equal share of this machine's cores unless given.
        replicas: about how many there will be.
        step_seconds: that a step may last; then the replica is ended as a lost one. None: any time.
    """

    replica = ProcessReplica

    def __init__(self, cpus: int | None, replicas: int, step_seconds: float | None = None):
        self._threads = cpus or max(1, (os.cpu_count() or 1) // max(1, replicas))
        self._step_seconds = step_seconds
        self._started = []

    def pools(self, config: EngineConfig, hear: Callable[[Any], None]) -> PrefillDecodePools:
        # No page travels, and the front starts a successor.
        return PrefillDecodePools(
            config, 1, 0, transfer="gloo", threads=self._threads, max_restarts=0, step_seconds=self._step_seconds,
            listener=hear,
        )  # fmt: skip
