"""Provide building blocks of codecs: small integer codes with scales, codes packed into bytes, products row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import WorkbenchError

CODE_BITS = (1, 2, 4, 8)  # bits of a code: whole codes fit in a byte
HALF_MAX = torch.finfo(torch.float16).max


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., number] of `bits` bits (1, 2, 4 or 8) into bytes [..., number * bits / 8] in uint8, the first
    code in the lowest bits. Raises WorkbenchError if the last byte would be incomplete.
    """
    each = _codes_per_byte(bits)
    if codes.shape[-1] % each:
        raise WorkbenchError(f"pack_bits: {codes.shape[-1]} codes of {bits} bits do not fill whole bytes of {each}")
    split = codes.to(torch.uint8).unflatten(-1, (-1, each))
    stored = split[..., 0]
    for place in range(1, each):
        stored = stored | split[..., place] << bits * place
    return stored.clone() if each == 1 else stored


def unpack_bits(stored: Tensor, bits: int) -> Tensor:
    """Return the codes that `pack_bits` packed: bytes [..., byte] to codes [..., byte * 8 / bits] in uint8."""
    each, mask = _codes_per_byte(bits), 2**bits - 1
    return torch.stack([stored >> bits * place & mask for place in range(each)], -1).flatten(-2)


def _codes_per_byte(bits: int) -> int:
    if bits not in CODE_BITS:
        raise WorkbenchError(f"codes have {', '.join(map(str, CODE_BITS[:-1]))} or {CODE_BITS[-1]} bits, not {bits}")
    return 8 // bits


def affine_codes(numbers: Tensor, bits: int, dim: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize numbers by steps up from their minimum along `dim`: number = minimum + scale * code.

    Returns:
        Codes in uint8 like `numbers`, not packed; scales and minima in float16, `dim` having length 1. Numbers beyond
        float16 are clamped.
    """
    exact = numbers.to(torch.promote_types(numbers.dtype, torch.float32)).clamp(-HALF_MAX, HALF_MAX)
    lowest, highest = exact.aminmax(dim=dim, keepdim=True)
    minima = lowest.half()
    scales = ((highest - minima.to(exact.dtype)) / (2**bits - 1)).clamp(0, HALF_MAX).half()
    steps = scales.to(exact.dtype)
    codes = (exact - minima.to(exact.dtype)) / torch.where(steps == 0, 1.0, steps)
    return codes.round().clamp(0, 2**bits - 1).to(torch.uint8), scales, minima


def affine_numbers(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Return the numbers that `affine_codes` quantized, in float32."""
    return minima.float() + scales.float() * codes.float()


def nearest_levels(numbers: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the nearest of `levels` [level] (ascending) for each number, in uint8; ties round up."""
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(numbers.contiguous(), middles, right=True).to(torch.uint8)


def project(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows [..., dim] times `matrix`, which is [dim, rank], or one matrix for each row [..., dim, rank]: [...,
    rank].

    Each row is summed in the same order, whatever the number of rows. (The summation order of a matrix product depends
    on that number, and the last bit can change a code.)
    """
    total = rows[..., :1] * matrix[..., 0, :]
    for column in range(1, matrix.shape[-2]):
        total = total + rows[..., column, None] * matrix[..., column, :]
    return total
