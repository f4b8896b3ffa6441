"""Look for what processes leave behind: other processes, and names in /dev/shm."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

SHARED = Path("/dev/shm")
MARK = "WORKBENCH_TESTS_MARK"


class LeftBehind:
    """Everything that comes from processes started with `environment`, under any name and parent.

    Children inherit the mark in the environment, so that each new process is seen, not only those that are expected; of
    /dev/shm every new name counts, but one that another program has in use or that is another user's.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.environment = os.environ | {MARK: self.mark}
        self._names = set(os.listdir(SHARED))

    def processes(self) -> list[int]:
        """Return the processes that carry the mark and have not ended."""
        wanted = f"{MARK}={self.mark}".encode()
        return [pid for pid in _processes() if wanted in _read(pid, "environ").split(b"\0") and not ended(pid)]

    def names(self) -> set[str]:
        """Return the names in /dev/shm that are new and that no process without the mark has open or mapped."""
        new = {name for name in set(os.listdir(SHARED)) - self._names if _owner(SHARED / name) == os.getuid()}
        if not new:
            return new
        own = set(self.processes())
        used = b"".join(_read(pid, "maps") + _opened(pid) for pid in _processes() if pid not in own)
        return {name for name in new if str(SHARED / name).encode() not in used}


def ended(pid: int) -> bool:
    """Return whether a process has ended, and waits at most for its parent to notice."""
    status = _read(pid, "status")
    return not status or b"State:\tZ" in status


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


def _opened(pid: int) -> bytes:
    found = []
    try:
        for each in os.scandir(f"/proc/{pid}/fd"):
            found.append(os.readlink(each.path).encode())
    except OSError:
        pass
    return b"\n".join(found)


def _owner(path: Path) -> int:
    try:
        return path.stat().st_uid
    except OSError:
        return -1
