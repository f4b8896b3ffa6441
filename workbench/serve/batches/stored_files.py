"""Keep files of each tenant on disk, within a budget of bytes for each tenant and for all.

    writer -> .ID.part --synced, renamed--> ID, then ID.json: a file has its description only when it is whole

Files with a purpose in `HIDDEN` are parts of running batches and results of message batches: they count against the
budget, are not listed, and end with the server.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.errors import cannot_write
from workbench.files import UnreadableText, note_own, read_json_file, write_atomically
from workbench.serve.errors import ApiError

MAX_FILES = 256  # listed files per tenant
MAX_TENANT_BYTES = 1 << 30
MAX_BYTES = 8 << 30
HIDDEN = ("upload", "batch_input", "message_results")
LEFTOVER_SECONDS = 3600.0  # age after which a file without description is left over from a dead process


@dataclass(frozen=True)
class StoredFile:
    """A stored file: its id and description. Times are in seconds of the epoch; `purpose` is batch, batch_output or one
    of `HIDDEN`.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created: int
    expires: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the file in OpenAI's shape."""
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created,
            "filename": self.filename, "purpose": self.purpose, "status": "processed", "expires_at": self.expires,
        }  # fmt: skip


@dataclass
class _Usage:
    """Usage of a tenant: bytes of all files, including files being written, and the number of listed files."""

    num_bytes: int = 0
    num_files: int = 0


class FileStore:
    """Files by tenant: `ID` is a file's content, `ID.json` its description. Any thread may use the store.

    Args:
        folder: folder of the files; files of an earlier server are found again. None: a folder that ends with the
            process.
        max_files: maximum listed files per tenant.
        max_tenant_bytes: maximum bytes of a tenant's files together.
        max_bytes: maximum bytes of all files together.
        clock: returns seconds of the epoch.
    """

    def __init__(
        self,
        folder: Path | None = None,
        max_files: int = MAX_FILES,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ):
        self._temporary = tempfile.TemporaryDirectory(prefix="workbench-files-") if folder is None else None
        self.folder = note_own(Path(self._temporary.name) if self._temporary is not None else Path(folder or ""))
        self._max_files, self._max_tenant_bytes, self._max_bytes = max_files, max_tenant_bytes, max_bytes
        self._clock, self._lock = clock, threading.Lock()
        self.num_bytes = 0
        self._usage: dict[str, _Usage] = {}
        self._files: dict[str, StoredFile] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._find_files()

    def writer(self, tenant: str, filename: str, purpose: str) -> FileWriter:
        """Return a writer for a new file (ApiError if the tenant has too many files)."""
        with self._lock:
            usage = self._usage.setdefault(tenant, _Usage())
            if purpose not in HIDDEN:
                if usage.num_files >= self._max_files:
                    words = f"file: {usage.num_files} files are kept for you, which is the limit; delete some"
                    raise ApiError("invalid_request_error", words, "file", "storage_full")
                usage.num_files += 1
        id = f"file-{secrets.token_hex(12)}"
        return FileWriter(self, StoredFile(id, tenant, filename, purpose, 0, int(self._clock())))

    def add(self, tenant: str, filename: str, purpose: str, content: Iterable[bytes]) -> StoredFile:
        """Store a file made of the parts `content` (ApiError if it exceeds the budget, or the disk is full)."""
        writer = self.writer(tenant, filename, purpose)
        try:
            for part in content:
                writer.write(part)
            return writer.finish()
        except BaseException:
            writer.discard()
            raise

    def list(self, tenant: str) -> list[StoredFile]:
        """Return the listed files of a tenant, oldest first."""
        self.expire()
        return [each for each in list(self._files.values()) if each.tenant == tenant and each.purpose not in HIDDEN]

    def get(self, tenant: str, id: str, param: str = "file_id") -> StoredFile:
        """Return a tenant's file; ApiError not_found_error if it does not exist or belongs to another tenant."""
        self.expire()
        found = self._files.get(id)
        if found is None or found.tenant != tenant or found.purpose in HIDDEN:
            raise ApiError("not_found_error", f"{param}: no file {id[:80]!r}", param, "file_not_found")
        return found

    def path(self, file: StoredFile) -> Path:
        return self.folder / file.id

    def remove(self, file: StoredFile) -> None:
        """Delete a file if it still exists."""
        with self._lock:
            if self._files.pop(file.id, None) is None:
                return
            self._count(file, -file.bytes, -1)
        self._description(file).unlink(missing_ok=True)
        self.path(file).unlink(missing_ok=True)

    def expire(self) -> None:
        """Delete expired files."""
        now = self._clock()
        for each in list(self._files.values()):
            if each.expires is not None and each.expires <= now:
                self.remove(each)

    # Called by writers.

    def reserve(self, tenant: str, size: int, must: bool = False) -> None:
        """Reserve `size` more bytes for a tenant; ApiError if they exceed the budget, unless `must` is set."""
        with self._lock:
            usage = self._usage.setdefault(tenant, _Usage())
            if not must:
                for used, most, whose in (
                    (usage.num_bytes, self._max_tenant_bytes, "for you"),
                    (self.num_bytes, self._max_bytes, "for all"),
                ):
                    if used + size > most:
                        words = (
                            f"file: {used:,} bytes of files and batches are kept {whose}, and the limit is {most:,}; "
                            "delete files or batches that have ended"
                        )
                        raise ApiError("invalid_request_error", words, "file", "storage_full")
            usage.num_bytes += size
            self.num_bytes += size

    def keep(self, file: StoredFile) -> None:
        """Write the description of a complete file."""
        try:
            described = json.dumps(asdict(file)).encode()
            write_atomically(self._description(file), lambda to: to.write(described))
        except OSError as error:
            raise ApiError("api_error", str(cannot_write("file", error))) from None
        with self._lock:
            self._files[file.id] = file

    def forget(self, file: StoredFile) -> None:
        """Subtract the bytes of a file that is not kept from the tenant's use."""
        with self._lock:
            self._count(file, -file.bytes, -1)

    def _count(self, file: StoredFile, size: int, number: int) -> None:
        usage = self._usage.setdefault(file.tenant, _Usage())
        usage.num_bytes += size
        self.num_bytes += size
        if file.purpose not in HIDDEN:
            usage.num_files += number

    def _find_files(self) -> None:
        """Read the descriptions; remove incomplete files of an earlier process."""
        for path in sorted(self.folder.glob("file-*.json"), key=lambda path: path.stat().st_mtime):
            try:
                found = StoredFile(**read_json_file(path))
                is_whole = found.id == path.stem and self.path(found).stat().st_size == found.bytes
            except (UnreadableText, TypeError, FileNotFoundError):
                continue
            if is_whole and found.purpose not in HIDDEN:
                self._files[found.id] = found
                self._count(found, found.bytes, 1)
            else:
                path.unlink(missing_ok=True)
                self.path(found).unlink(missing_ok=True)
        old = time.time() - LEFTOVER_SECONDS
        for path in (*self.folder.glob("file-*"), *self.folder.glob(".file-*")):
            if path.stem not in self._files and path.stat().st_mtime < old:
                path.unlink(missing_ok=True)

    def _description(self, file: StoredFile) -> Path:
        return self.folder / f"{file.id}.json"


@dataclass
class FileWriter:
    """A file being written, under a temporary name until it is complete. Its bytes count from the start."""

    store: FileStore
    file: StoredFile
    _is_open: bool = field(default=True, init=False)

    @property
    def path(self) -> Path:
        return self.store.folder / f".{self.file.id}.part"

    def write(self, content: bytes, must: bool = False) -> None:
        """Append bytes to the file: all of them, or none if an error is raised.

        Args:
            content: the bytes.
            must: count them even beyond the budget, for error lines, of which there is at most one per request.

        Raises:
            ApiError: if they exceed the budget, or the disk is full.
        """
        self.store.reserve(self.file.tenant, len(content), must)
        size = self.file.bytes
        self.file = replace(self.file, bytes=size + len(content))
        try:
            with self.path.open("ab") as file:
                file.write(content)
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, size)
            self.store.reserve(self.file.tenant, -len(content), must=True)
            self.file = replace(self.file, bytes=size)
            raise ApiError("api_error", str(cannot_write("file", error))) from None

    def finish(self, expires: int | None = None) -> StoredFile:
        """Keep the file, synced to disk, until it is removed or expires (ApiError if the disk is full)."""
        file = replace(self.file, expires=expires)
        try:
            with self.path.open("ab") as written:
                os.fsync(written.fileno())
            os.replace(self.path, self.store.path(file))
            self.store.keep(file)
        except (OSError, ApiError) as error:
            self.store.path(file).unlink(missing_ok=True)
            self.discard()
            if isinstance(error, ApiError):
                raise
            raise ApiError("api_error", str(cannot_write("file", error))) from None
        self._is_open = False
        return file

    def discard(self) -> None:
        """Discard the file. Does nothing if it was kept or discarded before."""
        if self._is_open:
            self._is_open = False
            self.path.unlink(missing_ok=True)
            self.store.forget(self.file)
