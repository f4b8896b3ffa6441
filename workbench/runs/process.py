"""Identify a process, so that another process can check whether it is still running.

The data comes from /proc: psutil has neither boots nor namespaces, and its start times change when the clock is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROC = Path("/proc")
ENDED_STATES = "ZX"  # a zombie has ended; only its parent has not collected it yet


def describe_process(pid: int | None = None) -> dict[str, Any] | None:
    """Describe a process (default: this one) as JSON: its pid and start time, and the boot and pid namespace in which
    the pid is valid.

    Returns None if the system does not report it (only Linux does), or if no such process runs."""
    try:
        started = _started(pid or os.getpid())
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink(PROC / "self/ns/pid")
    except (OSError, ValueError, IndexError):
        return None
    return None if started is None else {"pid": pid or os.getpid(), "started": started, "where": f"{boot} {space}"}


def is_running(description: object) -> bool | None:
    """Return whether the process with this `description`, made by `describe_process`, is still running.

    Returns None if this is unknown: for another machine or container, an earlier boot, or no description."""
    here = describe_process()
    if here is None or not isinstance(description, Mapping) or description.get("where") != here["where"]:
        return None
    pid = description.get("pid")
    return isinstance(pid, int) and describe_process(pid) == description


def _started(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of the process. Pids are reused; pid and start together are unique.
    """
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None if fields[0] in ENDED_STATES else int(fields[19])
