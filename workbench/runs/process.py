"""Identity of a process, so that another process can tell whether it is still running.

Read from /proc: psutil knows neither boots nor namespaces, and its start of a process moves when the clock is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROC = Path("/proc")
ENDED_STATES = "ZX"  # a zombie has ended; only its parent has not looked yet


def describe_process(pid: int | None = None) -> dict[str, Any] | None:
    """Describe a process (this one by default) as JSON: pid, start time, and the boot and pid namespace in which the
    pid is valid.

    Returns None where the system does not report it (only Linux does), or where no such process runs."""
    try:
        started = _started(pid or os.getpid())
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink(PROC / "self/ns/pid")
    except (OSError, ValueError, IndexError):
        return None
    return None if started is None else {"pid": pid or os.getpid(), "started": started, "where": f"{boot} {space}"}


def is_running(description: object) -> bool | None:
    """Return whether the process that `describe_process` described is still running.

    Returns None if this cannot be known from here: another machine or container, an earlier boot, or no description."""
    here = describe_process()
    if here is None or not isinstance(description, Mapping) or description.get("where") != here["where"]:
        return None
    pid = description.get("pid")
    return isinstance(pid, int) and describe_process(pid) == description


def _started(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of the process. Pids are reused; pid and start are unique."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None if fields[0] in ENDED_STATES else int(fields[19])
