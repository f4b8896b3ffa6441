"""Find runs below a folder: run folders, those of a sweep's points, and records of one JSON file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import MAX_JSON_BYTES
from workbench.study.run_folder import MANIFEST, MARKER

OF_A_RUN = {MARKER, MANIFEST, "experiment.yaml"}  # a folder with any of these is a run's
DEEPEST = 8  # levels below the folder that is searched
READ = 1 << 14  # bytes at once: most files are smaller, and a larger buffer costs more than a second read


@dataclass(frozen=True)
class Place:
    """The location of one run; its name is its path below the folder that was searched.

    `files` is empty for a record in one file.
    """

    name: str
    path: str
    files: frozenset[str]

    def read(self, name: str) -> str | None:
        """Read a file's text; None where it is missing or cannot be read."""
        return read_text(f"{self.path}/{name}") if name in self.files else None


def places(folder: Path | str) -> list[Place]:
    """List every run at or below `folder`, by name. WorkbenchError where there is no such folder."""
    top = str(folder)
    if not os.path.exists(top):
        raise WorkbenchError(f"{top}: no such folder; name one that holds runs, as `workbench run --out` makes them")
    if os.path.isfile(top):
        return [Place(os.path.basename(top), top, frozenset())]
    return sorted(_below(top, "", 0), key=lambda place: place.name)


def _below(path: str, name: str, depth: int) -> Iterator[Place]:
    try:
        inside = os.listdir(path)
    except OSError:
        return  # deleted meanwhile, or not readable
    if not OF_A_RUN.isdisjoint(inside):
        yield Place(name or os.path.basename(os.path.abspath(path)), path, frozenset(inside))
        return
    for each in inside:
        if each.startswith("."):
            continue
        below, called = f"{path}/{each}", f"{name}/{each}" if name else each
        if each.endswith(".json"):
            yield Place(called, below, frozenset())
        elif depth < DEEPEST:  # a file lists nothing
            yield from _below(below, called, depth + 1)


def read_text(path: str) -> str | None:
    """Read a file's text, replacing bytes that are no UTF-8.

    None where it cannot be read, empty where it is too long.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        pieces = [os.read(handle, READ)]
        while len(pieces[-1]) == READ:
            if len(pieces) * READ > MAX_JSON_BYTES:
                return ""  # longer than any record
            pieces.append(os.read(handle, READ))
        return b"".join(pieces).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(handle)
