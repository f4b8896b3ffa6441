"""End what a front leaves behind that was killed: Ray's processes, and its folder for sockets and logs.

front --- a pipe that it never writes to ---> watcher, a process of its own session: at the pipe's end, kill and remove

Ray's processes notice by themselves that their driver is gone, but after many seconds, and none removes the folder.
This file is run by its path and imports the standard library alone, so that a watcher takes few milliseconds and MiB.
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
TITLES = (b"ray::", b"ray-dashboard")  # with which Ray's processes in Python replace their command lines
MARK = b"RAY_RAYLET_PID="  # in the environment of a worker, and of what it starts
ROUNDS = 50  # of kills and removals, of 0.1 s each; a process that the kernel keeps for longer is left to it


class FrontWatch:
    """A watcher of this process, for a folder that Ray's processes name in their command lines, or have files of."""

    def __init__(self, folder: str):
        command = [sys.executable, "-S", "-E", str(Path(__file__).resolve()), folder, str(os.getpid())]
        # A session of its own: a signal for the front's group, such as Ctrl-C, is not for the watcher.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """End whatever is left now, and wait until it is gone. Does nothing the second time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def processes_of(folder: str, front: int) -> set[int]:
    """Return Ray's processes that name the folder or have a file of it open, and their descendants; not the front.

    Others may name it too, such as a `tail` of a log, or a backup; they are left alone."""
    own = {front, os.getpid()}
    parents: dict[int, int] = {}
    found: set[int] = set()
    for each in os.listdir("/proc"):
        with suppress(OSError, ValueError):  # no process, or one that ends now
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
    """Return whether a process is Ray's: by its program, its title, its script in Python, or its environment."""
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
    """Return whether a process has a file of the folder open: some of Ray's change their command lines."""
    files = f"/proc/{process}/fd"
    for each in os.listdir(files):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"{files}/{each}").startswith(folder + "/"):
                return True
    return False


def clean(folder: str, front: int) -> None:
    """Kill the processes of a folder but the front, and remove it."""
    for _ in range(ROUNDS):
        left = processes_of(folder, front)
        for each in left:
            with suppress(OSError):  # it has ended, or is another user's
                os.kill(each, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        if not left and not os.path.exists(folder):
            return
        time.sleep(0.1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its front, and not before
    sys.stdin.read()
    clean(sys.argv[1], int(sys.argv[2]))
