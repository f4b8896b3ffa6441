"""Clean up after a front that was killed: end Ray's processes and remove its folder for sockets and logs.

front --- a pipe that it never writes to ---> watcher, a process of its own session: at the pipe's end, kill and remove

Ray's processes notice that their driver is gone only after many seconds, and none removes the folder. This file is run
by its path and imports only the standard library, so that a watcher starts in milliseconds and takes few MiB.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

BINARIES = (b"raylet", b"gcs_server")
TITLES = (b"ray::", b"ray-dashboard")  # process titles of Ray's Python processes
MARK = b"RAY_RAYLET_PID="  # in the environment of Ray workers and their child processes
ROUNDS = 50  # of kills and removals, 0.1 s each; processes that survive them are left to the kernel


class FrontWatch:
    """A watcher process: when this process ends, it ends the Ray processes that use `folder` and removes the folder."""

    def __init__(self, folder: str):
        command = [sys.executable, "-S", "-E", str(Path(__file__).resolve()), folder, str(os.getpid())]
        # Its own session, so that signals to the front's group, such as Ctrl-C, do not reach the watcher.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Let the watcher end the remaining processes now, and wait for it. A second call does nothing."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def processes_of(folder: str, front: int) -> set[int]:
    """Return the Ray processes that use a folder, without the front: processes that name it or have a file in it open,
    and their descendants.

    Other processes that name the folder, such as a `tail` of a log or a backup, are left alone."""
    own = {front, os.getpid()}
    parents: dict[int, int] = {}
    found: set[int] = set()
    for each in os.listdir("/proc"):
        with suppress(OSError, ValueError):  # not a process, or it has just ended
            number = int(each)
            parents[number] = int(Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if number not in own and (_names(each, folder) or _has_open(each, folder)) and is_of_ray(each):
                found.add(number)
    news = found
    while news:
        news = {child for child, parent in parents.items() if parent in news} - found
        found = found | news
    return found


def is_of_ray(process: str) -> bool:
    """Return whether a process belongs to Ray, judged by its program, title, Python script or environment."""
    folder = Path(f"/proc/{process}")
    program, *words = (folder / "cmdline").read_bytes().split(b"\0")
    name = program.rsplit(b"/", 1)[-1]
    if name in BINARIES or program.startswith(TITLES):
        return True
    if name.startswith(b"python") and any(b"/ray/" in word and word.endswith(b".py") for word in words):
        return True
    return MARK in (folder / "environ").read_bytes()


def _names(process: str, folder: str) -> bool:
    return folder.encode() in Path(f"/proc/{process}/cmdline").read_bytes()


def _has_open(process: str, folder: str) -> bool:
    """Return whether a process has a file in the folder open; some of Ray's processes change their command lines."""
    files = f"/proc/{process}/fd"
    for each in os.listdir(files):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"{files}/{each}").startswith(folder + "/"):
                return True
    return False


def clean(folder: str, front: int) -> None:
    """Kill the Ray processes that use a folder, except the front, and remove the folder."""
    for _ in range(ROUNDS):
        left = processes_of(folder, front)
        for each in left:
            with suppress(OSError):  # it has ended, or belongs to another user
                os.kill(each, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        if not left and not os.path.exists(folder):
            return
        time.sleep(0.1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it must outlive its front
    sys.stdin.read()
    clean(sys.argv[1], int(sys.argv[2]))
