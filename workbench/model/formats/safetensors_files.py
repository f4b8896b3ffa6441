"""Index the tensors in the safetensors files of a model folder, and check that the files are complete.

Format: 8 bytes little-endian header length, a JSON header, the data. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_json
from workbench.model.formats.checkpoint import StoredTensor
from workbench.model.formats.mapped import MappedFile
from workbench.model.hf.fields import read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's limit
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
Tensors = TypeVar("Tensors", bound=StoredTensor)
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFile:
    """One safetensors file, mapped into memory when its first tensor is read; its data begins at byte `data`."""

    def __init__(self, path: Path, data: int):
        self.path, self.data = path, data

    @cached_property
    def mapped(self) -> MappedFile:
        try:
            with safe_open(str(self.path), framework="pt", device="cpu"):
                pass  # it checks that tensors fill the file and have the bytes of their shapes
            return MappedFile(self.path)
        except (SafetensorError, ValueError, OSError) as error:
            raise corrupt(self.path, error) from error


@dataclass(frozen=True)
class SafetensorsTensor(StoredTensor):
    """A tensor of a safetensors file; `dtype` is safetensors' name of its type: F32, BF16, I8, ..."""

    start: int  # first byte in the file's data
    source: SafetensorsFile

    def read(self) -> Tensor:
        if self.dtype not in DTYPES:
            raise WorkbenchError(f"{self.file}: a tensor of type {self.dtype} cannot be read")
        return self.source.mapped.tensor(self.source.data + self.start, DTYPES[self.dtype], self.shape)

    def read_into(self, out: Tensor) -> None:
        if out.numel() and out.dtype == DTYPES.get(self.dtype) and out.is_contiguous():
            self.source.mapped.read_into(self.source.data + self.start, out)
        else:
            super().read_into(out)

    def problem(self) -> str | None:
        if self.dtype in FLOAT_DTYPES:
            return None
        known = ", ".join(FLOAT_DTYPES)
        return f"is stored as {self.dtype}; supported: {known}, others with quantization_config"


def stored_tensors(folder: Path) -> dict[str, SafetensorsTensor]:
    """Return every tensor of the folder; only headers are read.

    Raises WorkbenchError if there are no weights or only pickled ones, if a shard is missing, and if a file is corrupt
    or truncated.
    """
    if (folder / SINGLE_FILE).exists():
        return read_header(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).exists():
        return shards_of(folder, INDEX_FILE, read_header)
    raise _no_weights(folder)


def read_header(file: Path) -> dict[str, SafetensorsTensor]:
    """Return the tensors of one file, from its header. Raises WorkbenchError if the file's length differs from the one
    in the header.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if start == b"version ":
                raise WorkbenchError(f"{file}: is a Git LFS pointer, not the weights; run `git lfs pull` there")
            if len(start) < 8 or length > size - 8:
                raise WorkbenchError(f"{file}: is cut short in its header ({size:,} bytes); {_AGAIN}")
            if length > MAX_HEADER_BYTES:
                raise WorkbenchError(f"{file}: is not safetensors (a header of {length:,} bytes); {_AGAIN}")
            header = stream.read(length)
    except OSError as error:
        raise WorkbenchError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        entries = read_json(header, max_bytes=MAX_HEADER_BYTES)
    except UnreadableText as error:
        reason = error.reason.removeprefix("not JSON: ")
        raise corrupt(file, f"its header is not JSON: {reason}") from None
    return _entries(file, entries, 8 + length, size - 8 - length)


def corrupt(file: Path, reason: object) -> WorkbenchError:
    return WorkbenchError(f"{file}: is corrupt ({reason}); {_AGAIN}")


_AGAIN = "fetch the file again"


def _entries(file: Path, header: object, data: int, data_bytes: int) -> dict[str, SafetensorsTensor]:
    if not isinstance(header, dict):
        raise corrupt(file, "the header is no JSON object")
    found: dict[str, SafetensorsTensor] = {}
    promised, source = 0, SafetensorsFile(file, data)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
            start, end = (int(offset) for offset in entry["data_offsets"])
            promised = max(promised, end)
        except (TypeError, LookupError, ValueError, OverflowError) as error:
            raise corrupt(file, f"the header's entry for {name} is malformed") from error
        found[name] = SafetensorsTensor(file, dtype, shape, end - start, start, source)
    if promised > data_bytes:
        raise WorkbenchError(f"{file}: is cut short ({data_bytes:,} of {promised:,} bytes of data are there); {_AGAIN}")
    return found


def shards_of(folder: Path, index_file: str, read: Callable[[Path], dict[str, Tensors]]) -> dict[str, Tensors]:
    """Return the tensors of all files that an index lists, by name; `read` reads one file. Raises WorkbenchError for a
    shard that is missing, lacks a tensor, or has a tensor that the index assigns to another shard.
    """
    index = folder / index_file
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(s, str) for s in places.values()):
        raise WorkbenchError(f"{index}: weight_map must map tensor names to file names; {_AGAIN}")
    shards = sorted(set(places.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise WorkbenchError(f"{index}: {outside[0]!r} must be the plain name of a file in the same folder")
    missing = [shard for shard in shards if not (folder / shard).exists()]
    if missing:
        raise WorkbenchError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}; fetch them"
        )
    found = {shard: read(folder / shard) for shard in shards}
    for name, shard in places.items():
        if name not in found[shard]:
            raise WorkbenchError(f"{index}: says {name} is in {shard}, which does not hold it; fetch both again")
    for shard, tensors in found.items():
        twice = next((name for name in tensors if places.get(name, shard) != shard), None)
        if twice is not None:
            raise WorkbenchError(f"{index}: says {twice} is in {places[twice]}, yet {shard} holds one too; keep one")
    return {name: found[shard][name] for name, shard in places.items()}


def _no_weights(folder: Path) -> WorkbenchError:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return WorkbenchError(f"{folder}: cannot be read ({error.strerror})")
    other = [name for name in names if name.endswith(".safetensors")]
    if other:
        return WorkbenchError(f"{folder}: holds {other[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}; fetch that")
    pickled = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickled:
        return WorkbenchError(
            f"{folder}: {pickled[0]} is refused: it is pickled, under a name that is not read, and a pickle can run "
            'any code; where you trust it, convert it to safetensors: python -c "from transformers import '
            "AutoModelForCausalLM as M; "
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
        )
    return WorkbenchError(f"{folder}: holds no weights; it must hold {SINGLE_FILE}, or {INDEX_FILE} and its shards")
