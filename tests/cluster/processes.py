"""Look at processes of this machine by their numbers."""

from __future__ import annotations

import os
from contextlib import suppress


def is_alive(process: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def descendants(process: int) -> set[int]:
    """Return the processes that descend from one."""
    parents: dict[int, int] = {}
    for each in os.listdir("/proc"):
        if each.isdigit():
            with suppress(OSError), open(f"/proc/{each}/stat") as file:
                parents[int(each)] = int(file.read().rsplit(")", 1)[1].split()[1])
    found, news = set[int](), {process}
    while news:
        news = {child for child, parent in parents.items() if parent in news} - found
        found |= news
    return found
