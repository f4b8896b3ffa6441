"""Start Ray on this machine, even if it is busy, or join a cluster, with the settings that Ray's import and start
need.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workbench.errors import installed_by

SECONDS_EACH = 20  # of the machine, that count as one of Ray's 30 for a node's start: it has no setting for them
STARTS = 3  # maximum starts of a node with a dead raylet
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage statistics are sent
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a late call in another thread must not start Ray again
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",  # Ray's 60 s are too few on a busy machine
    "RAY_agent_register_timeout_ms": "600000",  # and so are its 30 s
    "RAY_worker_niceness": "0",  # with Ray's niceness of 15, other processes would distort timings and starve replicas
}


def import_ray(what: str) -> Any:
    """Import and return the module `ray` with its settings applied; WorkbenchError, naming `what`, if it is missing."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with installed_by("cluster", what):
        import ray
        import ray.cloudpickle
        import ray.exceptions
    return ray


def start_ray(ray: Any, **options: Any) -> None:
    """Call `ray.init` with these options; a node may take `SECONDS_EACH` times as long to start as Ray's own limit.

    If its raylet dies, which Ray does not notice, the node is started again at once, at most `STARTS` times in all."""
    for left in reversed(range(STARTS)):
        try:
            with slow_start():
                return ray.init(**options)
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


@contextmanager
def slow_start() -> Iterator[None]:
    """Within this block, extend Ray's limit for a node's start by the factor `SECONDS_EACH`, and end the wait once its
    raylet has died.
    """
    from ray._private import node

    start_raylet = node.Node.start_raylet

    def start_with_ports(self: Any, *args: Any, **options: Any) -> None:
        _write_agent_ports(self)
        start_raylet(self, *args, **options)

    node.time, node.Node.start_raylet = _SlowClock(ended_raylets()), start_with_ports
    try:
        yield
    finally:
        node.time, node.Node.start_raylet = time, start_raylet


def _write_agent_ports(node: Any) -> None:
    """Write the ports that a raylet waits for until its agents write them: it ends after 15 seconds, without a setting
    (issue 65983 of ray-project/ray). Nothing here uses metrics or the dashboard, which get no port."""
    raylet = importlib.import_module("ray._raylet")  # which has no stubs
    if not hasattr(raylet, "persist_port"):  # a Ray that waits for no file
        return
    for agent in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN"):
        raylet.persist_port(node.get_session_dir_path(), node.node_id, getattr(raylet, f"{agent}_PORT_NAME"), -1)
    with socket.socket() as free:
        free.bind(("", 0))
        node._ray_params.runtime_env_agent_port = node._ray_params.runtime_env_agent_port or free.getsockname()[1]


def ended_raylets() -> set[str]:
    """Return the process ids of this process's raylets that have ended and were not waited for (only on Linux;
    elsewhere none).
    """
    found = set[str]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            number, _, rest = file.read_text().partition(" (raylet) ")
            if rest.split()[:2] == ["Z", str(os.getpid())]:
                found.add(number)
    return found


class _SlowClock:
    """A stand-in for the module `time` during a node's start; `ended` are raylets that had died before."""

    def __init__(self, ended: set[str]):
        self._ended = ended

    def monotonic(self) -> float:
        return math.inf if ended_raylets() - self._ended else time.monotonic() / SECONDS_EACH

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
