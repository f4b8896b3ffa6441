"""Convert the blocks of GGUF tensors to words and scales (see compiled_kernels/linear/planes.py), and to numbers.

Layouts: ggml-common.h of llama.cpp. The numbers equal those of `gguf.dequantize` bit for bit; NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_kernels.blocked.layout import BYTE_OF_COLUMN
from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from compiled_kernels.threads import in_threads
from workbench.model.formats.mapped import release

Array = np.ndarray[Any, Any]
CHUNK_VALUES = 1 << 20  # numbers dequantized at once: about 32 MiB of temporaries
CHUNK_BYTES = 1 << 20  # bytes of blocks converted to words at once: numpy calls synchronize threads


class Plane(NamedTuple):
    """A plane of a block's codes: `size` bytes from byte `start` on, with fields of `bits` bits. Columns are ordered
    within a run of bytes: the lowest field of each byte, then the next field of each. A `run` of 1 is a byte with the
    bits of 8 columns, the lowest first."""

    start: int
    size: int
    bits: int
    run: int

    def fill(self, blocks: Array, words: Array) -> None:
        """Copy this plane of `blocks`, uint8 [block, byte], into `words`, uint32 [block, word]."""
        if self.run == 1:
            places = (blocks[:, self.start + place] for place in range(self.size))
            np.bitwise_or.reduce([WORD_OF_BITS[place].take(each) for place, each in enumerate(places)], out=words[:, 0])
            return
        lanes = _bytes(blocks, self.start, self.size).view(np.uint64)
        moved = (lanes ^ lanes >> np.uint64(8)) & _in_each(0xFF00, 32)  # bytes 1 and 2 of four change places
        lanes = (lanes ^ moved ^ moved << np.uint64(8)).reshape(len(blocks), -1, self.run // 8)
        width, first = self.run * self.bits // 32, 0
        for run in range(lanes.shape[1]):
            for shift in range(0, 8, self.bits):
                codes = lanes[:, run] >> np.uint64(shift) & _in_each((1 << self.bits) - 1, 8)
                bits = self.bits
                while bits < 8:  # two neighbouring words become one, with twice as many bits in each byte
                    codes = (codes.view(np.uint64) | codes.view(np.uint64) >> np.uint64(32 - bits)).astype(np.uint32)
                    bits *= 2
                _copy(codes.view(np.uint32), words[:, first : first + width])
                first += width


def _in_each(bits: int, width: int) -> np.uint64:
    """Return a mask that has `bits` in every `width` bits of 64."""
    return np.uint64(sum(bits << at for at in range(0, 64, width)))


def _word_of_bits() -> Array:
    """Return the contribution of a byte with the bits of 8 columns to the word of 32 columns: uint32 [byte's index,
    byte].
    """
    column = np.arange(32).reshape(4, 1, 8)
    at = column // 4 + 8 * np.array(BYTE_OF_COLUMN)[column % 4]
    return ((np.arange(256)[:, None] >> np.arange(8) & 1) << at).sum(-1).astype(np.uint32)


WORD_OF_BITS = _word_of_bits()


def _copy(rows: Array, out: Array) -> None:
    """Copy rows of bytes as single elements, which takes a third of the time."""
    whole = f"V{rows.shape[1] * rows.itemsize}"
    out.view(whole)[:] = rows.view(whole)


def _bytes(blocks: Array, start: int, size: int) -> Array:
    """Return `size` bytes of each block, contiguous."""
    return np.ascontiguousarray(blocks[:, start : start + size].view(f"V{size}")).view(np.uint8)


def _gathered(lanes: Array, bits: int) -> Array:
    """Compact fields of `bits` bits, one at the low end of each byte of uint64; the field of byte 0 becomes the
    lowest.
    """
    for span in (8, 16, 32):
        lanes = (lanes | lanes >> np.uint64(span - bits)) & _in_each((1 << 2 * bits) - 1, 2 * span)
        bits *= 2
    return lanes.astype(np.uint32)


def _fill_q2_k(blocks: Array, words: Array) -> None:
    lanes = _bytes(blocks, 0, 16).view(np.uint64)
    words[:, :2] = _gathered(lanes & _in_each(15, 8), 4)
    words[:, 2:] = _gathered(lanes >> np.uint64(4) & _in_each(15, 8), 4)


def _fill_q3_k(blocks: Array, words: Array) -> None:
    low = _bytes(blocks, 96, 8).view(np.uint64) >> np.array([0, 4], np.uint64)
    high = _bytes(blocks, 104, 4).view(np.uint32).astype(np.uint64)
    pairs = high >> np.array([0, 4], np.uint64)
    words[:, :2] = _gathered(low & _in_each(15, 8), 4)
    high = _gathered((pairs | pairs >> np.uint64(2) << np.uint64(32)) & _in_each(3, 8), 2)
    words[:, 2] = high[:, 0] | high[:, 1] << np.uint32(16)


def _fill_q4_k(blocks: Array, words: Array) -> None:
    stored = _bytes(blocks, 4, 12).view(np.uint32).astype(np.uint64)
    first, both = stored[:, :2], stored[:, 2:] >> np.array([0, 4], np.uint64)  # dtype of scales, and of minima
    words[:, :2] = _gathered((first & np.uint64(0xFFFFFFFF) | both << np.uint64(32)) & _in_each(15, 8), 4)
    upper = first >> np.uint64(4)
    high = _gathered((upper | upper >> np.uint64(2) << np.uint64(32)) & _in_each(3, 8), 2)
    words[:, 2] = high[:, 0] | high[:, 1] << np.uint32(16)


def _fill_q6_k(blocks: Array, words: Array) -> None:
    _copy(_bytes(blocks, 192, 16), words)


@dataclass(frozen=True)
class BlockType:
    """A quantization type of GGUF: a block stores `values` numbers in `bytes` bytes.

    Args:
        planes: the planes of its codes, if a format in words holds them.
        scales: the byte positions of a block's scale and minimum (if it has one).
        fill_sub_scales: writes the words of sub-scales.
    """

    name: str
    values: int
    bytes: int
    planes: tuple[Plane, ...] = ()
    scales: tuple[int, ...] = (0,)
    fill_sub_scales: Callable[[Array, Array], None] | None = None

    @property
    def format(self) -> MatrixFormat | None:
        """Return the in-memory format for matrices of this type; None if no format in words can hold them."""
        return INT4_TYPES.get(self.name) or (MatrixFormat.named(self.name.lower()) if self.planes else None)


INT4_TYPES = {
    "Q4_0": MatrixFormat("int4", 32, torch.float16), "Q4_1": MatrixFormat("int4", 32, torch.float16, torch.float16),
}  # fmt: skip
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, (Plane(2, 16, 4, 16),)),
    3: BlockType("Q4_1", 32, 20, (Plane(4, 16, 4, 16),), (0, 2)),
    6: BlockType("Q5_0", 32, 22, (Plane(6, 16, 4, 16), Plane(2, 4, 1, 1))),
    7: BlockType("Q5_1", 32, 24, (Plane(8, 16, 4, 16), Plane(4, 4, 1, 1)), (0, 2)),
    8: BlockType("Q8_0", 32, 34, (Plane(2, 32, 8, 32),)),
    10: BlockType("Q2_K", 256, 84, (Plane(16, 64, 2, 32),), (80, 82), _fill_q2_k),
    11: BlockType("Q3_K", 256, 110, (Plane(32, 64, 2, 32), Plane(0, 32, 1, 32)), (108,), _fill_q3_k),
    12: BlockType("Q4_K", 256, 144, (Plane(16, 128, 4, 32),), (0, 2), _fill_q4_k),
    13: BlockType("Q5_K", 256, 176, (Plane(48, 128, 4, 32), Plane(16, 32, 1, 32)), (0, 2), _fill_q4_k),
    14: BlockType("Q6_K", 256, 210, (Plane(0, 128, 4, 64), Plane(128, 64, 2, 32)), (208,), _fill_q6_k),
    20: BlockType("IQ4_NL", 32, 18, (Plane(2, 16, 4, 16),)),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17, (Plane(1, 16, 4, 16),)),
}
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
UNREAD_TYPES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def fill_words(type: BlockType, data: Tensor, stored: Sequence[Tensor]) -> None:
    """Convert a matrix from blocks to words, scales and minima (if any), bit for bit, in torch's threads; the type must
    have a `format`.

    Args:
        type: the type of the blocks.
        data: uint8 [block * type.bytes].
        stored: contiguous output tensors in the layout of the format's `storage`.
    """
    blocks = data.numpy().reshape(-1, type.bytes)
    words, *scales = (each.numpy().reshape(len(blocks), -1) for each in stored)
    words, step = words.view(np.uint32), CHUNK_BYTES // type.bytes
    planes = [plane.bits * type.values // 32 for plane in type.planes]

    def fill(first: int) -> None:
        chunk, out, done = blocks[first : first + step], words[first : first + step], 0
        for plane, width in zip(type.planes, planes, strict=True):
            plane.fill(chunk, out[:, done : done + width])
            done += width
        if type.fill_sub_scales is not None:
            type.fill_sub_scales(chunk, out[:, done:])
        for at, each in zip(type.scales, scales, strict=True):
            each[first : first + step] = chunk[:, at : at + each.itemsize].view(each.dtype)
        release(data[first * type.bytes : (first + step) * type.bytes])  # if it is a view of a file

    in_threads(fill, range(0, len(blocks), step))


def matrix_in_words(type: BlockType, data: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Return the words, scales and minima of a matrix [rows, column] in blocks, as `fill_words` writes them."""
    assert type.format is not None
    storage = type.format.storage(rows, len(data) // type.bytes * type.values // rows)
    stored = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in storage.values())
    fill_words(type, data, stored)
    return stored


def dequantize_blocks(type: BlockType, data: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers in whole blocks.

    Args:
        type: the type of the blocks.
        data: uint8 [block * type.bytes].
        dtype: dtype of the result; numbers are computed in float32 and then rounded.

    Returns:
        [block * type.values].
    """
    if type.name in PLAIN_DTYPES:
        return data.view(PLAIN_DTYPES[type.name]).to(dtype)
    values = torch.empty(len(data) // type.bytes * type.values, dtype=dtype)
    parts = data.split(CHUNK_VALUES // type.values * type.bytes)
    for chunk, out in zip(parts, values.split(CHUNK_VALUES // type.values * type.values), strict=True):
        assert type.format is not None
        found = dequantize_matrix(type.format, *matrix_in_words(type, chunk, len(chunk) // type.bytes))
        out.copy_(found.flatten())
    return values
