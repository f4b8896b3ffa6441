"""Weights in few bits: quantized, packed, and as numbers again.

INT4 in a group of `g` columns: byte i holds column i in its low half and column i + g/2 in its high half, each as
value + 8 (beside minima as it is), so that unpacking a run of bytes gives two runs of columns (the layout of
llama.cpp's Q4_0 and Q4_1).
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from compiled_kernels.linear.matrix_format import INT8_MATRIX, MatrixFormat
from compiled_kernels.linear.words import dequantize_words, quantize_words


def quantize_int8(weight: Float[Tensor, "out width"]) -> tuple[Int8[Tensor, "out width"], Float[Tensor, " out"]]:
    """Quantize to values in -127..127 and float32 scales, so that |weight - value * scale| <= scale / 2."""
    exact = weight.float()
    scales = (exact.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (exact / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


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
    low, high = columns.amin(dim=-1, keepdim=True), columns.amax(dim=-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    equal = (high == -low)[..., 0]  # the first of the two counts; argmax finds it, and takes five times as long
    rows = columns[equal]
    largest[equal] = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True))
    scales = (largest / -8).half()
    exact = scales.float()
    values = (columns / exact.masked_fill(exact == 0, torch.inf)).round_().clamp_(-8, 7).add_(8)
    return _packed_halves(values.to(torch.uint8)), scales[..., 0]


def quantize_matrix(weight: Float[Tensor, "out width"], format: MatrixFormat) -> tuple[Tensor, ...]:
    """Quantize to the codes, scales and minima of any format in few bits: the nearest codes of scales that reach from
    a group's least to its largest number (without minima: to its largest either way), rounded to their type."""
    if format == INT8_MATRIX:
        return quantize_int8(weight)
    if format.words is not None:
        if problem := format.problem(weight.shape[1]):
            raise ValueError(f"{problem} {weight.shape[1]} columns")
        return quantize_words(weight, format.words)
    if format.codes == "int4" and format.scales == torch.float16 and format.minima is None:
        return quantize_int4(weight, format.group)
    rows, columns = weight.shape
    group = format.group or columns
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % group), mode="replicate")
    grouped = rearrange(padded, "out (column_group column) -> out column_group column", column=group)
    least, most = {"int8": (-128, 127), "int4": (-8, 7), "fp8": (-448, 448)}[format.codes]
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    wanted = torch.maximum(-low, high) / most if format.minima is None else (high - low) / (most - least)
    scales = wanted.to(format.scales)
    if format.minima is not None and format.codes == "int4":
        least, most = 0, 15
    minima = None if format.minima is None else (low - least * scales.float()).to(format.minima)
    away = grouped - (0.0 if minima is None else minima.float())
    numbers = torch.where(scales == 0, 0.0, away / scales.float()).clamp(least, most)
    numbers = rearrange(numbers, "out column_group column -> out (column_group column)")[:, :columns]
    codes = numbers.to(torch.float8_e4m3fn) if format.codes == "fp8" else numbers.round().to(torch.int8)
    if format.codes == "int4":
        codes = pack_int4(codes, group, offset=0 if least == 0 else 8)
    found = [codes, scales[..., 0] if format.group else scales[:, 0, 0]]
    return tuple(found if minima is None else [*found, minima[..., 0]])


def dequantize_matrix(
    format: MatrixFormat, codes: Tensor, scales: Tensor, minima: Tensor | None = None
) -> Float[Tensor, "out width"]:
    """Return `codes * scales + minima` in float32; in float64 with scales of float64."""
    if format == INT8_MATRIX:
        return dequantize_int8(codes, scales)
    if format.words is not None:
        return dequantize_words(format.words, codes, scales, minima)
    group = format.group or codes.shape[1]
    return dequantize_grouped(codes, scales if format.group else scales[:, None], minima, group)


def dequantize_grouped(
    codes: Tensor,
    scales: Float[Tensor, "out column_group"],
    minima: Float[Tensor, "out column_group"] | None,
    group: int,
) -> Float[Tensor, "out width"]:
    """Return codes (int8, E4M3, or uint8 as in `pack_int4`) times scales plus minima of groups of `group` columns; in
    float32, or in float64 with scales of float64."""
    exact = torch.promote_types(scales.dtype, torch.float32)
    if codes.dtype == torch.uint8:
        codes = unpack_int4(codes, group, offset=8 if minima is None else 0)
    columns = codes.shape[1]

    def spread(each: Tensor) -> Tensor:
        if (
            columns % group
        ):  # by index: Inductor of torch 2.13 multiplies a product with a slice of a repetition wrongly
            return each.to(exact)[:, torch.arange(columns, device=each.device) // group]
        return repeat(each.to(exact), "out column_group -> out (column_group column)", column=group)

    values = codes.to(exact) * spread(scales)
    return values if minima is None else values + spread(minima)


def pack_int4(codes: Int8[Tensor, "out width"], group: int, offset: int = 8) -> UInt8[Tensor, "out half"]:
    """Pack codes from -offset to 15 - offset, two a byte, as `quantize_int4` does."""
    values = (codes + offset).view(torch.uint8)
    return _packed_halves(rearrange(values, "out (column_group column) -> out column_group column", column=group))


def unpack_int4(packed: UInt8[Tensor, "out half"], group: int, offset: int = 8) -> Int8[Tensor, "out width"]:
    """Return the codes of a matrix that `quantize_int4` or `pack_int4` packed."""
    halves = rearrange(packed, "out (column_group half) -> out column_group half", half=group // 2)
    values = torch.cat([halves & 15, halves >> 4], dim=-1).to(torch.int8) - offset
    return rearrange(values, "out column_group column -> out (column_group column)")


def _packed_halves(values: UInt8[Tensor, "out column_group column"]) -> UInt8[Tensor, "out half"]:
    low, high = values.chunk(2, dim=-1)
    return rearrange(low | high << 4, "out column_group half -> out (column_group half)")
