"""Find runs below a folder: run folders, folders of a sweep's points, and records in single JSON files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import MAX_JSON_BYTES
from workbench.runs.condition import MANIFEST, MARKER

RUN_FILES = {MARKER, MANIFEST, "experiment.yaml"}  # a folder with any of these is a run folder
MAX_FOLDER_DEPTH = 8  # levels below the searched folder
READ_BYTES = 1 << 14  # bytes per read: most files are smaller, and a larger buffer costs more than a second read


@dataclass(frozen=True)
class RunLocation:
    """The location of one run; its name is its path below the searched folder.

    `files` is empty for a record in a single file.
    """

    name: str
    path: str
    files: frozenset[str]

    def read(self, name: str) -> str | None:
        """Read a file's text; None if it is missing or cannot be read."""
        return read_text(f"{self.path}/{name}") if name in self.files else None


def find_runs(folder: Path | str) -> list[RunLocation]:
    """List every run at or below `folder`, by name. Raises WorkbenchError if there is no such folder."""
    top = str(folder)
    if not os.path.exists(top):
        raise WorkbenchError(f"{top}: no such folder; name one that holds runs, as `workbench run --out` makes them")
    if os.path.isfile(top):
        return [RunLocation(os.path.basename(top), top, frozenset())]
    return sorted(_find_below(top, "", 0), key=lambda place: place.name)


def _find_below(path: str, name: str, depth: int) -> Iterator[RunLocation]:
    try:
        inside = os.listdir(path)
    except OSError:
        return  # deleted in the meantime, or not readable
    if not RUN_FILES.isdisjoint(inside):
        yield RunLocation(name or os.path.basename(os.path.abspath(path)), path, frozenset(inside))
        return
    for each in inside:
        if each.startswith("."):
            continue
        below, called = f"{path}/{each}", f"{name}/{each}" if name else each
        if each.endswith(".json"):
            yield RunLocation(called, below, frozenset())
        elif depth < MAX_FOLDER_DEPTH:  # recursion into a file lists no run
            yield from _find_below(below, called, depth + 1)


def read_text(path: str) -> str | None:
    """Read a file's text, replacing bytes that are not UTF-8.

    None if it cannot be read, empty if it is too long.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        pieces = [os.read(handle, READ_BYTES)]
        while len(pieces[-1]) == READ_BYTES:
            if len(pieces) * READ_BYTES > MAX_JSON_BYTES:
                return ""  # longer than any record
            pieces.append(os.read(handle, READ_BYTES))
        return b"".join(pieces).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(handle)
