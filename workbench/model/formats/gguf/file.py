"""Read a GGUF file through a memory map: its metadata, and the positions of its tensors.

Format, versions 2 and 3, little-endian: `GGUF`, the version, two counts, key-values, tensor infos, then the data,
each tensor aligned to `general.alignment`. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Every length is compared with the remaining bytes of the file before it is used for a read or an allocation.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from workbench.errors import WorkbenchError, nearest
from workbench.model.formats.gguf.blocks import BLOCK_TYPES, UNREAD_TYPES, BlockType, dequantize_blocks
from workbench.model.formats.mapped import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65_535  # the format's limit for a key
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
SMALLEST_TENSOR_INFO = 8 + 1 + 4 + 8 + 4 + 8  # a name of one byte, one dimension
SMALLEST_PAIR = 8 + 1 + 4 + 1


@dataclass(frozen=True)
class GGUFTensor:
    """The position of a tensor: `shape` is in torch's order (rows first); `start` is its first byte in the file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Return the number of bytes that the tensor takes in the file."""
        return math.prod(self.shape) // self.type.values * self.type.bytes


@dataclass(frozen=True)
class GGUFArray:
    """A metadata array: `count` values of one kind in `bytes` of the file, read on demand."""

    path: Path
    bytes: memoryview
    key: str
    kind: int
    count: int

    def __len__(self) -> int:
        return self.count

    def values(self) -> list[Any]:
        """Return the values as Python objects (str for strings); they are read from the file once.

        Raises:
            WorkbenchError: for a string that is not UTF-8.
        """
        return self._values

    @cached_property
    def _values(self) -> list[Any]:
        if self.kind == STRING:
            return self._strings()
        values = list(struct.unpack(f"<{self.count}{SCALARS[self.kind]}", self.bytes))
        return [bool(value) for value in values] if self.kind == BOOL else values

    def _strings(self) -> list[str]:
        # A vocabulary has up to 262,144 strings: slicing bytes takes a third of the time of slicing a memoryview.
        whole, at, length_at = bytes(self.bytes), 0, struct.Struct("<Q").unpack_from
        values: list[str] = []
        try:
            for _ in range(self.count):
                start = at + 8
                at = start + length_at(whole, at)[0]
                values.append(str(whole[start:at], "utf-8"))
        except UnicodeDecodeError as error:
            fault = f"{self.key[:300]}, entry {len(values)}: is no UTF-8 ({error.reason}); fetch the file again"
            raise WorkbenchError(f"{self.path}: {fault}") from None
        return values


class GGUFFile:
    """The metadata and tensors of one GGUF file.

    `metadata` has numbers, strings and truth values as Python's, and arrays as `GGUFArray`. `tensors` are in the order
    of the file. The file stays mapped as long as this object or a tensor from `data` exists.

    Raises:
        WorkbenchError: for a file that is not GGUF, is truncated or damaged, and for unsupported tensor types.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._bytes = self._map()
        self.bytes = self._bytes.numpy().data.toreadonly()
        self._at = 0
        self.version = self._header()
        tensor_count, pair_count = self._read("<QQ", "its counts")
        self._check_count("tensors", tensor_count, SMALLEST_TENSOR_INFO)
        self._check_count("metadata entries", pair_count, SMALLEST_PAIR)
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._name("a metadata key")
            if key in self.metadata:
                raise self.damaged(f"metadata key {key!r} occurs twice")
            self.metadata[key] = self._value(key, self._read("<I", f"the type of {key!r}")[0])
        self.tensors: dict[str, GGUFTensor] = {}
        for _ in range(tensor_count):
            info = self._info()
            if info.name in self.tensors:
                raise self.damaged(f"tensor {info.name!r} occurs twice")
            self.tensors[info.name] = info
        self._place(self._alignment())

    def blocks(self, name: str) -> Tensor:
        """Return the stored bytes of a tensor, uint8: a view of the mapped file."""
        info = self._tensor(name)
        return self._bytes[info.start : info.start + info.size]

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor's numbers as `dtype`, computed in float32. A tensor stored as `dtype` stays a view of the
        mapped file.
        """
        info = self._tensor(name)
        return dequantize_blocks(info.type, self.blocks(name), dtype).view(info.shape)

    def damaged(self, reason: str) -> WorkbenchError:
        return WorkbenchError(
            f"{self.path}: {reason if len(reason) < 400 else reason[:400] + '...'}; fetch the file again"
        )

    def _map(self) -> Tensor:
        try:
            size = self.path.stat().st_size
            if size < 24:
                raise self.damaged(f"is no GGUF file ({size} bytes)")
            return MappedFile(self.path).tensor(0, torch.uint8, (size,))
        except OSError as error:
            raise WorkbenchError(f"{self.path}: cannot be read ({error.strerror})") from None

    def _header(self) -> int:
        start = bytes(self.bytes[:8])
        if start == b"version ":
            raise WorkbenchError(f"{self.path}: is a Git LFS pointer, not the weights; run `git lfs pull` there")
        if start[:4] != MAGIC:
            raise WorkbenchError(f"{self.path}: is no GGUF file (it begins with {start[:4]!r}, not {MAGIC!r})")
        version = int.from_bytes(start[4:], "little")
        self._at = 8
        if int.from_bytes(start[4:], "big") in VERSIONS:
            raise WorkbenchError(
                f"{self.path}: is big-endian; convert it to little-endian (gguf-py's gguf_convert_endian)"
            )
        if version not in VERSIONS:
            raise WorkbenchError(
                f"{self.path}: is GGUF of version {version}; supported: {' and '.join(map(str, VERSIONS))}"
            )
        return version

    def _read(self, form: str, what: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(form, self.bytes, self._at)
        except struct.error:
            raise self.damaged(f"is cut short in {what}, at byte {self._at:,}") from None
        self._at += struct.calcsize(form)
        return values

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        """Refuse a count of parts, each of a minimum size, that exceeds the rest of the file."""
        left = len(self.bytes) - self._at
        if count > left // least_bytes:
            raise self.damaged(f"says it has {count:,} {what}, in {left:,} bytes: it is cut short or damaged")

    def _skip(self, what: str) -> int:
        """Read a length, skip that many bytes and return their start."""
        (length,) = self._read("<Q", what)
        start, left = self._at, len(self.bytes) - self._at
        if length > left:
            raise self.damaged(f"says {what} has {length:,} bytes, of which {left:,} are there")
        self._at += length
        return start

    def _name(self, what: str) -> str:
        start = self._skip(what)
        if not 0 < self._at - start <= MAX_NAME_BYTES:
            raise self.damaged(f"has {what} of {self._at - start:,} bytes; must be 1 to {MAX_NAME_BYTES:,}")
        try:
            name = str(self.bytes[start : self._at], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"has {what} that is no UTF-8, at byte {start:,}") from None
        if not name.isprintable():
            raise self.damaged(f"has {what} of characters that are not printable, at byte {start:,}")
        return name

    def _value(self, key: str, kind: int) -> Any:
        what = f"the value of {key!r}"
        if kind == STRING:
            start = self._skip(what)
            return str(self.bytes[start : self._at], "utf-8", "replace")
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise self.damaged(f"{key} has an unknown type, {kind}")
        (value,) = self._read(f"<{SCALARS[kind]}", what)
        return bool(value) if kind == BOOL else value

    def _array(self, key: str) -> GGUFArray:
        what = f"the value of {key!r}"
        kind, count = self._read("<IQ", what)
        if kind not in SCALARS and kind != STRING:
            raise self.damaged(f"{key} is an array of an unknown type, {kind}")
        self._check_count(f"entries in {key}", count, 8 if kind == STRING else struct.calcsize(SCALARS[kind]))
        start = self._at
        if kind == STRING:
            self._at = self._end_of_strings(key, count)
        else:
            self._at += count * struct.calcsize(SCALARS[kind])
        return GGUFArray(self.path, self.bytes[start : self._at], key, kind, count)

    def _end_of_strings(self, key: str, count: int) -> int:
        view, at, length_at = self.bytes, self._at, struct.Struct("<Q").unpack_from
        last = len(view) - 8
        for index in range(count):
            if at > last:
                raise self.damaged(f"is cut short in {key}, entry {index:,} of {count:,}")
            at += 8 + length_at(view, at)[0]
        if at > len(view):
            raise self.damaged(f"says the last entry of {key} ends at byte {at:,}, past the file's {len(view):,}")
        return at

    def _info(self) -> GGUFTensor:
        name = self._name("a tensor's name")
        (dimensions,) = self._read("<I", f"the shape of {name}")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise self.damaged(f"{name} has {dimensions} dimensions; must be 1 to {MAX_DIMENSIONS}")
        *innermost_first, kind, offset = self._read(f"<{dimensions}QIQ", f"the shape of {name}")
        if kind not in BLOCK_TYPES:
            if kind not in UNREAD_TYPES:
                raise self.damaged(f"{name} is stored as type {kind}, which is unknown")
            known = ", ".join(each.name for each in BLOCK_TYPES.values())
            raise WorkbenchError(f"{self.path}: {name} is stored as {UNREAD_TYPES[kind]}; supported: {known}")
        info = GGUFTensor(name, BLOCK_TYPES[kind], tuple(reversed(innermost_first)), offset)
        if min(info.shape) < 1 or info.shape[-1] % info.type.values:
            right = "positive" if info.type.values == 1 else f"positive, the last a multiple of {info.type.values}"
            raise self.damaged(f"{name}, stored as {info.type.name}, has shape {list(info.shape)}; it must be {right}")
        return info

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment is {alignment!r}; it must be a power of two, from 8 on")
        return alignment

    def _place(self, alignment: int) -> None:
        """Replace offsets by file positions; refuse tensors that are unaligned, overlap or end beyond the file."""
        data = -(-self._at // alignment) * alignment
        end, before = data, ""
        for info in sorted(self.tensors.values(), key=lambda each: each.start):
            start = data + info.start
            if info.start % alignment:
                raise self.damaged(
                    f"{info.name} begins at byte {info.start:,} of the data, which is not aligned to {alignment}"
                )
            if start < end:
                raise self.damaged(f"{info.name} overlaps {before}")
            end, before = start + info.size, info.name
            if end > len(self.bytes):
                there = max(0, len(self.bytes) - start)
                raise self.damaged(f"is cut short: of {info.name}'s {info.size:,} bytes {there:,} are there")
            self.tensors[info.name] = GGUFTensor(info.name, info.type, info.shape, start)

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise WorkbenchError(f"{self.path}: has no tensor {name!r}{nearest(name, self.tensors)}")
        return self.tensors[name]


_open: WeakValueDictionary[tuple[object, ...], GGUFFile] = WeakValueDictionary()


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file, or return it if it is already open: the header of a large vocabulary takes long to read."""
    try:
        now = path.stat()
    except OSError:
        return GGUFFile(path)  # it raises with the reason
    state = path, now.st_ino, now.st_size, now.st_mtime_ns
    if (file := _open.get(state)) is None:
        file = _open[state] = GGUFFile(path)
    return file
