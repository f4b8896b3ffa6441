"""Keep the requests of a batch on disk, one per line; only the lines' offsets are in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.serve.batches.stored_files import FileStore, FileWriter
from workbench.serve.errors import ApiError
from workbench.serve.json_bytes import dumps, loads

WRITTEN_BYTES = 1 << 20  # bytes buffered before a write


@dataclass(frozen=True)
class BatchItem:
    """One request of a batch; `error` is set if the request is invalid and cannot run."""

    custom_id: str
    path: str
    body: Mapping[str, Any]
    error: ApiError | None = None

    def line(self, max_bytes: int) -> bytes:
        """Return the item as a line; an item over `max_bytes`, or not representable in JSON, becomes an error."""
        try:
            line = self._json()
        except TypeError as refused:  # a lone surrogate, or a number over 64 bits
            return self._refused(ApiError("invalid_request_error", f"the request cannot be read: {refused}"))
        if len(line) > max_bytes:
            words = f"the request has {len(line):,} bytes; at most {max_bytes:,} are read"
            return self._refused(ApiError("request_too_large", words))
        return line + b"\n"

    def _json(self) -> bytes:
        error = self.error and (self.error.kind, self.error.message, self.error.param, self.error.code)
        return dumps((self.custom_id, self.path, self.body, error))

    def _refused(self, error: ApiError) -> bytes:
        name = self.custom_id.encode("utf-8", "replace").decode()
        return BatchItem(name, self.path, {}, error)._json() + b"\n"


@dataclass
class BatchRequests:
    """The requests of one batch, in a hidden file of the tenant."""

    _writer: FileWriter
    _offsets: array[int] = field(default_factory=lambda: array("Q"))

    @classmethod
    def write(cls, store: FileStore, tenant: str, items: Iterable[BatchItem], max_bytes: int) -> BatchRequests:
        """Write the items to a file on disk, each of at most `max_bytes`, and return them as BatchRequests. Raise
        ApiError if there is no room, and the errors that `items` raises.
        """
        found = cls(store.writer(tenant, "", "batch_input"))
        size, lines = 0, bytearray()
        try:
            for item in items:
                line = item.line(max_bytes)
                found._offsets.append(size)
                size += len(line)
                lines += line
                if len(lines) >= WRITTEN_BYTES:
                    found._writer.write(bytes(lines))
                    lines.clear()
            found._writer.write(bytes(lines))
        except BaseException:
            found.discard()
            raise
        return found

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> BatchItem:
        with self._writer.path.open("rb") as file:
            file.seek(self._offsets[index])
            *values, error = loads(file.readline())
        return BatchItem(*values, error=None if error is None else ApiError(*error))

    def discard(self) -> None:
        self._writer.discard()
