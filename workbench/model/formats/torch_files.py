"""Read PyTorch's own files, `pytorch_model.bin` or an index with shards, over a memory map. They are read with
`weights_only`, which builds only tensors; files that need more of pickle are refused.

Format: a ZIP archive whose entries are stored as they are: https://pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import StoredTensor
from workbench.model.formats.safetensors_files import FLOAT_DTYPES, shards_of

SINGLE_TORCH_FILE = "pytorch_model.bin"
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"
INTEGERS = {torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64"}
NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()} | INTEGERS
MAX_PICKLE_BYTES = 100_000_000  # of the entry that lists tensors


@dataclass(frozen=True)
class TorchTensor(StoredTensor):
    """A tensor of a PyTorch file, which is mapped into memory."""

    mapped: Tensor

    def read(self) -> Tensor:
        return self.mapped

    def problem(self) -> str | None:
        return None if self.dtype in FLOAT_DTYPES else f"has type {self.dtype}; supported: {', '.join(FLOAT_DTYPES)}"


def torch_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's PyTorch files. Raises WorkbenchError if a shard is missing, and for files
    that are corrupt, truncated, or have other objects than tensors."""
    if (folder / SINGLE_TORCH_FILE).exists():
        return read_torch_file(folder / SINGLE_TORCH_FILE)
    return shards_of(folder, TORCH_INDEX_FILE, read_torch_file)


def read_torch_file(file: Path) -> dict[str, StoredTensor]:
    """Map the tensors of one file into memory, and return them by name."""
    _check_archive(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever torch throws at bytes that are not its own
        reason = " ".join(str(error).split())[:200]
        raise WorkbenchError(
            f"{file}: is refused: only tensors are read, and this is more or is corrupt ({reason}); where you trust "
            "it, convert it to safetensors"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise WorkbenchError(f"{file}: holds no mapping of names to tensors")
    other = next((name for name, tensor in found.items() if type(tensor) is not Tensor), None)
    if other is not None:
        raise WorkbenchError(f"{file}: {other} is not a tensor")
    for name, tensor in found.items():
        if tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise WorkbenchError(
                f"{file}: is refused: {name} has shape {list(tensor.shape)}, more numbers than are stored; save it "
                "again with every tensor made contiguous"
            )
    return {
        name: TorchTensor(file, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), tensor.nbytes, tensor)
        for name, tensor in found.items()
    }


def _check_archive(file: Path) -> None:
    """Raise WorkbenchError for a file that is no such archive, or claims to be larger than it is."""
    try:
        with file.open("rb") as stream:
            pointer = stream.read(8) == b"version "
    except OSError as error:
        raise WorkbenchError(f"{file}: cannot be read ({error.strerror})") from None
    if pointer:
        raise WorkbenchError(f"{file}: is a Git LFS pointer, not the weights; run `git lfs pull` there")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        raise WorkbenchError(
            f"{file}: is refused: it is cut short, or pickled without an archive of tensors; such a pickle can run any "
            "code; where you trust it, convert it to safetensors"
        ) from None
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise WorkbenchError(f"{file}: is refused: {entry.filename} in it is compressed, which torch never does")
        if entry.filename.endswith("data.pkl") and entry.file_size > MAX_PICKLE_BYTES:
            raise WorkbenchError(f"{file}: is refused: {entry.filename} in it has {entry.file_size:,} bytes")
