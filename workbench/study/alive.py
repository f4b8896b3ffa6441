"""Which process wrote something, so that another can tell whether it still runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROC = Path("/proc")
DEAD = "ZX"  # a zombie has ended; only its parent has not looked yet


def process(pid: int | None = None) -> dict[str, Any] | None:
    """A process (this one) as JSON: its number, when it was started, and where that number means it.

    None where the system does not tell (only Linux does), or no such process runs.
    """
    try:
        started = _started(pid or os.getpid())
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink(PROC / "self/ns/pid")
    except (OSError, ValueError, IndexError):
        return None
    return None if started is None else {"pid": pid or os.getpid(), "started": started, "where": f"{boot} {space}"}


def runs(mark: object) -> bool | None:
    """Whether the process that `process` described runs now; None if that cannot be told from here: another
    machine or container, a start of this machine before this one's, or no description."""
    here = process()
    if here is None or not isinstance(mark, Mapping) or mark.get("where") != here["where"]:
        return None
    pid = mark.get("pid")
    return isinstance(pid, int) and process(pid) == mark


def _started(pid: int) -> int | None:
    """Clock ticks from the machine's start to the process's: numbers are given again, these two together never."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None if fields[0] in DEAD else int(fields[19])
