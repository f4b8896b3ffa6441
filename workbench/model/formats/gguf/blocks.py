"""Blocks of GGUF tensors as numbers: each type's size, and its dequantization in float32.

Layouts: ggml-common.h of llama.cpp. Every result equals `gguf.dequantize` bit for bit; a NaN stays one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compiled_kernels.expert_linear.packed import E2M1

CHUNK_VALUES = 1 << 22  # numbers dequantized at once: temporaries of some 64 MiB
E2M1_TWICE = tuple(int(2 * value) for value in E2M1)  # as ggml has them: its zeros have no sign


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at `start` of each block as float32, [block, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _bits(bytes: Tensor, bits: int, run: int) -> Tensor:
    """Unpack fields of `bits`: of each run of bytes first all lowest fields, then all next ones. [block, value]"""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    fields = bytes.reshape(len(bytes), -1, 1, run) >> shifts & (1 << bits) - 1
    return fields.reshape(len(bytes), -1)


def _single_bits(bytes: Tensor) -> Tensor:
    """Unpack bits, the lowest of a byte first. [block, 8 * bytes]"""
    return (bytes[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _q4_0_codes(blocks).float()


def _q4_0_codes(blocks: Tensor) -> Tensor:
    return _bits(blocks[:, 2:], 4, 16).to(torch.int8) - 8


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _q4_1_codes(blocks).float() + _half(blocks, 2)


def _q4_1_codes(blocks: Tensor) -> Tensor:
    return _bits(blocks[:, 4:], 4, 16).to(torch.int8)


def _q5_0(blocks: Tensor) -> Tensor:
    values = _bits(blocks[:, 6:], 4, 16) | _single_bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (values.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _bits(blocks[:, 8:], 4, 16) | _single_bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * values.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _q8_0_codes(blocks).float() * _half(blocks, 0)


def _q8_0_codes(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    scale, least = _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float()
    values = _bits(blocks[:, 16:80], 2, 32).float().view(-1, 16, 16)
    return (scale[:, :, None] * values - least[:, :, None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = (_bits(low, 4, 8) | _bits(high, 2, 4) << 4).float() - 32
    missing = _bits(blocks[:, :32], 1, 32) ^ 1  # a bit that is absent lowers its value by 4
    values = _bits(blocks[:, 32:96], 2, 32).float() - 4 * missing.float()
    return ((_half(blocks, 108) * scales)[:, :, None] * values.view(-1, 16, 16)).flatten(1)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 8 scales and 8 minima of 6 bits in the 12 bytes of Q4_K and Q5_K."""
    scale, least, both = packed.split(4, dim=1)
    scales = torch.cat([scale & 63, both & 15 | scale >> 2 & 48], dim=1)
    return scales.float(), torch.cat([least & 63, both >> 4 | least >> 2 & 48], dim=1).float()


def _scaled_by_32(blocks: Tensor, values: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale, least = (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minima)[:, :, None]
    return (scale * values.float().view(-1, 8, 32) - least).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_by_32(blocks, _bits(blocks[:, 16:], 4, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    return _scaled_by_32(blocks, _bits(blocks[:, 48:], 4, 32) | _bits(blocks[:, 16:48], 1, 32) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    values = (_bits(blocks[:, :128], 4, 64) | _bits(blocks[:, 128:192], 2, 32) << 4).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_half(blocks, 208) * scales)[:, :, None] * values.view(-1, 16, 16)).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].int()
    # Half of 2^(exponent - 127), since the table has doubled values; the two least are subnormal.
    scale = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23).view(torch.float32)
    return scale * torch.tensor(E2M1_TWICE, dtype=torch.float32)[_bits(blocks[:, 1:], 4, 16).int()]


def mxfp4_codes(data: Tensor) -> Tensor:
    """Return the codes of MXFP4 blocks, uint8 [block, 32]."""
    return _bits(data.view(-1, 17)[:, 1:], 4, 16)


def mxfp4_exponents(data: Tensor) -> Tensor:
    """Return the exponents of MXFP4 blocks plus 127, uint8 [block]."""
    return data.view(-1, 17)[:, 0]


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF tensors: `values` numbers stored in `bytes` bytes."""

    name: str
    values: int
    bytes: int
    unpack: Callable[[Tensor], Tensor]  # uint8 [block, bytes] -> float32 [block, values]


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


class GroupedType(NamedTuple):
    """A type whose block is integers times the float16 at its start, plus the one at `minimum_at` where it has such.

    Args:
        kind: of the integers.
        codes: blocks -> int8 [block, value]; beside minima 0 to 15.
        minimum_at: the byte of the minimum in a block.
    """

    kind: Literal["int4", "int8"]
    codes: Callable[[Tensor], Tensor]
    minimum_at: int | None = None

    def scales(self, blocks: Tensor) -> Tensor:
        return _half(blocks, 0)

    def minima(self, blocks: Tensor) -> Tensor | None:
        return None if self.minimum_at is None else _half(blocks, self.minimum_at)


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _plain(torch.float32)),
    1: BlockType("F16", 1, 2, _plain(torch.float16)),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _plain(torch.bfloat16)),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
GROUPED_TYPES: dict[str, GroupedType] = {
    "Q4_0": GroupedType("int4", _q4_0_codes),
    "Q4_1": GroupedType("int4", _q4_1_codes, minimum_at=2),
    "Q8_0": GroupedType("int8", _q8_0_codes),
}
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
UNREAD_TYPES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def dequantize_blocks(type: BlockType, data: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of whole blocks.

    Args:
        type: their type.
        data: uint8 [block * type.bytes].
        dtype: of the result; numbers are computed in float32 and then rounded.

    Returns:
        [block * type.values].
    """
    if type.name in PLAIN_DTYPES:
        return data.view(PLAIN_DTYPES[type.name]).to(dtype)
    blocks = data.view(-1, type.bytes)
    values = torch.empty(len(blocks) * type.values, dtype=dtype)
    step = max(1, CHUNK_VALUES // type.values)
    for start in range(0, len(blocks), step):
        chunk = type.unpack(blocks[start : start + step])
        values[start * type.values : start * type.values + chunk.numel()] = chunk.flatten()
    return values
