"""The file of answers: lines in order, only ever added to, so that whatever stands in it whole is done.

    | line 1 \n | line 2 \n | ... | line k \n | half a li     a kill may come at any byte:
                                              ^ cut off when it is opened again
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from workbench.errors import WorkbenchError
from workbench.files import read_json


class OutputFile:
    """`ids` are the answers that are there, in order, and `failed` how many of them have an error; `add` writes one
    more line, whole or, at worst, as a half that is mended the next time."""

    def __init__(self, path: Path, handle: BinaryIO, ids: list[str], failed: int, cut: int):
        self.path, self.ids, self.failed, self.cut = path, ids, failed, cut
        self._handle = handle

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[OutputFile]:
        """Made if it is not there. WorkbenchError where it cannot be written, another process writes it, or a line of
        it is no answer."""
        try:
            handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise WorkbenchError(f"output {path}: cannot be written ({error.strerror}); name a file") from None
        with handle:
            _lock(path, handle)
            ids, failed, whole = _read(path, handle)
            cut = handle.seek(0, os.SEEK_END) - whole
            handle.truncate(whole)
            handle.seek(whole)
            yield cls(path, handle, ids, failed, cut)
            handle.flush()
            os.fsync(handle.fileno())

    def add(self, line: bytes) -> None:
        try:
            self._handle.write(line)
            self._handle.flush()
        except OSError as error:
            raise WorkbenchError(
                f"output {self.path}: cannot be written ({error.strerror}); what it holds is kept: make room, run again"
            ) from None


def _read(path: Path, handle: BinaryIO) -> tuple[list[str], int, int]:
    """The ids of the whole lines, how many have an error, and where they end."""
    ids, failed, end = [], 0, 0
    for number, line in enumerate(handle, 1):
        if not line.endswith(b"\n"):
            break
        try:
            answer = read_json(line)
            ids.append(str(answer["id"]))
            failed += answer["error"] is not None
        except (ValueError, TypeError, LookupError):
            raise WorkbenchError(f"output {path}, line {number}: is no answer of a batch; name another file") from None
        end += len(line)
    return ids, failed, end


def _lock(path: Path, handle: BinaryIO) -> None:
    """One process at a time, where the system has such locks; it ends with the process, however that ends."""
    if importlib.util.find_spec("fcntl") is None:
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise WorkbenchError(f"output {path}: another process writes it; wait, or name another file") from None
