"""Append responses to a file in order, so that every complete line in it is a final response.

| line 1 \n | line 2 \n | ... | line k \n | half a li     a kill may interrupt any byte:
                                          ^ truncated when the file is opened again
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

from workbench.errors import WorkbenchError, cannot_write
from workbench.files import read_json


class OutputFile:
    """The output file of a batch: `ids` of its responses in order, and the number of `failed` responses."""

    def __init__(self, path: Path, handle: RawIOBase, ids: list[str], failed: int, cut: int):
        self.path, self.ids, self.failed, self.truncated_bytes = path, ids, failed, cut
        self._handle = handle

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[OutputFile]:
        """Open the file, creating it if needed, and truncate a partial last line. A newly created file is removed if an
        error occurs before the first write.

        Raises:
            WorkbenchError: if it cannot be written, another process writes it, or a line is not a response.
        """
        existed = path.exists()
        try:
            handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        except OSError as error:
            raise WorkbenchError(f"output {path}: cannot be written ({error.strerror}); name a file") from None
        with handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise WorkbenchError(f"output {path}: is not a regular file; name a file")
            _lock(path, handle)
            with open(handle.fileno(), "rb", closefd=False) as lines:
                ids, failed, whole = _read(path, lines)
            cut = handle.seek(0, os.SEEK_END) - whole
            handle.seek(whole)
            with _write_errors(path):
                handle.truncate(whole)
            try:
                yield cls(path, handle, ids, failed, cut)
            except BaseException:
                if not existed and not handle.tell():
                    path.unlink(missing_ok=True)
                raise
            with _write_errors(path):
                os.fsync(handle.fileno())

    def append(self, line: bytes) -> None:
        """Append one line. If this raises WorkbenchError, the file is as it was before."""
        end = self._handle.tell()
        with _write_errors(self.path):
            try:
                while line:  # unbuffered: a full disk accepts a part before the write that fails
                    line = line[self._handle.write(line) :]
            except OSError:
                with suppress(OSError):
                    self._handle.truncate(end)
                    self._handle.seek(end)
                raise


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(f"output {path}", error) from None


def _read(path: Path, handle: BinaryIO) -> tuple[list[str], int, int]:
    """Return the ids of complete lines, the number of failed responses, and the byte offset of their end."""
    ids, failed, end = [], 0, 0
    for number, line in enumerate(handle, 1):
        if not line.endswith(b"\n"):
            break
        try:
            answer = read_json(line)
            ids.append(str(answer["id"]))
            failed += answer["response"]["status_code"] != 200
        except (ValueError, TypeError, LookupError):
            raise WorkbenchError(f"output {path}, line {number}: not an answer of a batch; name another file") from None
        end += len(line)
    return ids, failed, end


def _lock(path: Path, handle: RawIOBase) -> None:
    """Lock the file for this process if the system supports it; the lock ends with the process."""
    if importlib.util.find_spec("fcntl") is None:
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise WorkbenchError(f"output {path}: another process writes it; wait, or name another file") from None
