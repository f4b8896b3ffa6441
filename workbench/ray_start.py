"""Start Ray on this machine, however busy it is, or join a cluster; one place for what its import and start need."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS_EACH = 20  # of the machine, that count as one of Ray's 30 for a node's start: it has no setting for them
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that still asks must not start Ray anew
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",  # its 60 are too few on a busy machine
    "RAY_worker_niceness": "0",  # at Ray's niceness of 15 other processes would distort timings, and starve replicas
}


def import_ray() -> Any:
    """Return the module `ray`, whose settings are made (ImportError where it is not installed)."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    import ray.cloudpickle
    import ray.exceptions

    return ray


def start_ray(ray: Any, **options: Any) -> None:
    """Call `ray.init` with these options; a node may take `SECONDS_EACH` times as long to start as Ray waits."""
    with slow_start():
        ray.init(**options)


@contextmanager
def slow_start() -> Iterator[None]:
    """Give a node that this process starts meanwhile `SECONDS_EACH` times as long as Ray waits for it."""
    from ray._private import node

    node.time = _SlowClock()
    try:
        yield
    finally:
        node.time = time


class _SlowClock:
    """Stands for the module `time` while a node starts."""

    def monotonic(self) -> float:
        return time.monotonic() / SECONDS_EACH

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
