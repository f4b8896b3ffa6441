"""Keep the requests of a batch on disk, one a line: in memory are only the places of the lines."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from workbench.serve.batches.stored_files import FileStore, FileWriter
from workbench.serve.errors import ApiError

WRITTEN_BYTES = 1 << 20  # that are collected before they are written


@dataclass(frozen=True)
class BatchItem:
    """One request of a batch; `error` if it was found to be invalid before it could run."""

    custom_id: str
    path: str
    body: Mapping[str, Any]
    error: ApiError | None = None

    def line(self, max_bytes: int) -> bytes:
        """Return the item as a line; one of more than `max_bytes`, or that JSON cannot hold, as an error."""
        error = None if self.error is None else (self.error.kind, self.error.message, self.error.param, self.error.code)
        try:
            line = orjson.dumps((self.custom_id, self.path, self.body, error))
        except TypeError as refused:  # half of a surrogate pair, a number of more than 64 bits
            return self._refused(ApiError("invalid_request_error", f"the request cannot be read: {refused}"))
        if len(line) > max_bytes:
            words = f"the request has {len(line):,} bytes; at most {max_bytes:,} are read"
            return self._refused(ApiError("request_too_large", words))
        return line + b"\n"

    def _refused(self, error: ApiError) -> bytes:
        name = self.custom_id.encode("utf-8", "replace").decode()
        return orjson.dumps((name, self.path, {}, (error.kind, error.message, error.param, error.code))) + b"\n"


@dataclass
class BatchRequests:
    """The requests of one batch, in a hidden file of the tenant's."""

    _writer: FileWriter
    _offsets: array[int] = field(default_factory=lambda: array("Q"))

    @classmethod
    def write(cls, store: FileStore, tenant: str, items: Iterable[BatchItem], max_bytes: int) -> BatchRequests:
        """Write items to the disk; `max_bytes` is of one. ApiError where there is no room; what `items` raises."""
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
            custom_id, path, body, error = orjson.loads(file.readline())
        return BatchItem(custom_id, path, body, None if error is None else ApiError(*error))

    def discard(self) -> None:
        self._writer.discard()
