"""Weights as INT8 (one scale a row) or INT4 (one scale a group of columns), symmetric.

INT4 in a group of `g` columns: byte i holds column i in its low half and column i + g/2 in its high half, each as
value + 8, so that unpacking a run of bytes gives two runs of columns (the layout of llama.cpp's Q4_0).
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int8, UInt8
from torch import Tensor


def quantize_int8(weight: Float[Tensor, "out width"]) -> tuple[Int8[Tensor, "out width"], Float[Tensor, " out"]]:
    """Quantize to values in -127..127 and float32 scales, so that |weight - value * scale| <= scale / 2."""
    exact = weight.float()
    scales = (exact.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (exact / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def dequantize_int8(values: Int8[Tensor, "out width"], scales: Float[Tensor, " out"]) -> Float[Tensor, "out width"]:
    return values * scales[:, None]


def quantize_int4(
    weight: Float[Tensor, "out width"], group: int = 64
) -> tuple[UInt8[Tensor, "out half"], Float[Tensor, "out column_group"]]:
    """Quantize to values in -8..7, two a byte, and float16 scales: the largest of a group becomes -8 or 7, whichever
    its sign allows."""
    if weight.shape[1] % group or group % 2:
        raise ValueError(f"INT4 groups of {group} do not divide {weight.shape[1]} columns; the group must be even")
    columns = rearrange(weight.float(), "out (column_group column) -> out column_group column", column=group)
    largest = columns.gather(-1, columns.abs().argmax(dim=-1, keepdim=True))
    scales = (largest / -8).half()
    exact = scales.float()
    values = torch.where(exact == 0, 0.0, columns / exact).round().clamp(-8, 7) + 8
    return _packed_halves(values.to(torch.uint8)), scales[..., 0]


def pack_int4(codes: Int8[Tensor, "out width"], group: int) -> UInt8[Tensor, "out half"]:
    """Pack codes in -8..7, two a byte, as `quantize_int4` does."""
    values = (codes + 8).view(torch.uint8)
    return _packed_halves(rearrange(values, "out (column_group column) -> out column_group column", column=group))


def unpack_int4(packed: UInt8[Tensor, "out half"], group: int) -> Int8[Tensor, "out width"]:
    """Return the codes in -8..7 of a matrix that `quantize_int4` or `pack_int4` packed."""
    halves = rearrange(packed, "out (column_group half) -> out column_group half", half=group // 2)
    values = torch.cat([halves & 15, halves >> 4], dim=-1).to(torch.int8) - 8
    return rearrange(values, "out column_group column -> out (column_group column)")


def _packed_halves(values: UInt8[Tensor, "out column_group column"]) -> UInt8[Tensor, "out half"]:
    low, high = values.chunk(2, dim=-1)
    return rearrange(low | high << 4, "out column_group half -> out (column_group half)")


def dequantize_int4(
    packed: UInt8[Tensor, "out half"], scales: Float[Tensor, "out column_group"]
) -> Float[Tensor, "out width"]:
    halves = rearrange(packed, "out (column_group half) -> out column_group half", column_group=scales.shape[1])
    values = torch.cat([halves & 15, halves >> 4], dim=-1).to(torch.int8) - 8
    wide = scales if scales.dtype == torch.float64 else scales.float()
    exact = repeat(wide, "out column_group -> out column_group column", column=values.shape[-1])
    return rearrange(values * exact, "out column_group column -> out (column_group column)")
