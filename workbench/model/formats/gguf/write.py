"""Write a GGUF file: metadata, tensor infos, then the tensors one by one, each quantized during the write.

Version 3, little-endian; rounding is that of ggml's reference quantizers. https://github.com/ggml-org/ggml
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from workbench.files import write_atomically
from workbench.model.formats.gguf.blocks import BLOCK_TYPES, CHUNK_VALUES, PLAIN_DTYPES, BlockType
from workbench.model.formats.gguf.file import ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, STRING

UINT32, INT32, FLOAT32 = 4, 5, 6
TYPES = {type.name: (number, type) for number, type in BLOCK_TYPES.items()}
WRITTEN_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor to write to a GGUF file; its numbers are computed only when it is written."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    read: Callable[[], Tensor]

    @property
    def size(self) -> int:
        return math.prod(self.shape) // self.type.values * self.type.bytes


def written_type(shape: tuple[int, ...], matrix: str) -> BlockType:
    """Return the type in which a tensor is written: `matrix` if it has two or more axes and whole blocks per row;
    float32 if it has one axis; otherwise float16.
    """
    if len(shape) < 2:
        return TYPES["F32"][1]
    type = TYPES[matrix][1]
    return type if shape[-1] % type.values == 0 else TYPES["F16"][1]


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Iterable[WrittenTensor], matrices: bool = True
) -> None:
    """Write a GGUF file atomically.

    Args:
        path: the file.
        metadata: truth values, integers (32 bits), floats, strings, and lists of one of these.
        tensors: tensors in file order.
        matrices: write the matrices' numbers; otherwise they are zeros, which take no space in a sparse file.

    Raises:
        OSError: if the file cannot be written.
    """
    tensors = list(tensors)
    head = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, data = _value(value)
        head += [_string(key), struct.pack("<I", kind), data]
    offset = 0
    for tensor in tensors:
        number, _ = TYPES[tensor.type.name]
        sizes = tensor.shape[::-1]
        head += [_string(tensor.name), struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset)]
        offset += _padded(tensor.size)

    def fill(file: BinaryIO) -> None:
        start = b"".join(head)
        file.write(start.ljust(_padded(len(start)), b"\0"))
        for tensor in tensors:
            if matrices or len(tensor.shape) < 2:
                _write_tensor(file, tensor)
            else:
                file.seek(_padded(tensor.size), os.SEEK_CUR)
        file.truncate(file.tell())

    write_atomically(path, fill)


def quantize_blocks(type: BlockType, numbers: Tensor) -> Tensor:
    """Quantize numbers [block * type.values] to stored blocks, uint8 [block * type.bytes]."""
    if type.name in PLAIN_DTYPES:
        return numbers.to(PLAIN_DTYPES[type.name]).contiguous().view(torch.uint8)
    blocks = numbers.float().view(-1, type.values)
    if type.name == "Q8_0":
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        exact = blocks * torch.where(scales == 0, 0.0, 1 / scales)
        whole = exact.abs().floor()  # round half away from zero
        codes = (exact.sign() * (whole + (2 * (exact.abs() - whole)).floor())).to(torch.int8).view(torch.uint8)
    else:
        largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
        scales = largest / -8
        exact = blocks * torch.where(scales == 0, 0.0, 1 / scales)
        low, high = (exact + 8.5).trunc().to(torch.uint8).clamp(max=15).chunk(2, dim=1)
        codes = low | high << 4
    return torch.cat([scales.half().view(torch.uint8), codes], dim=1).flatten()


def _write_tensor(file: BinaryIO, tensor: WrittenTensor) -> None:
    numbers = tensor.read().reshape(-1)
    step = CHUNK_VALUES // tensor.type.values * tensor.type.values
    for start in range(0, numbers.numel(), step):
        file.write(quantize_blocks(tensor.type, numbers[start : start + step]).numpy().data)
    file.write(b"\0" * (_padded(tensor.size) - tensor.size))


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> tuple[int, bytes]:
    """Return a value's type and bytes."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<B", value)
    if isinstance(value, int):
        return (UINT32, struct.pack("<I", value)) if value >= 0 else (INT32, struct.pack("<i", value))
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, _string(value)
    kinds = {_value(each)[0] for each in value}
    if len(kinds) > 1 or kinds == {UINT32}:  # llama.cpp only accepts signed integers
        return ARRAY, struct.pack(f"<IQ{len(value)}i", INT32, len(value), *value)
    return ARRAY, struct.pack("<IQ", min(kinds, default=STRING), len(value)) + b"".join(_value(e)[1] for e in value)
