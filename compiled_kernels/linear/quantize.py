"""Quantize weights to few bits, pack them, and convert them back to numbers.

INT4 is stored in words of eight columns (see planes.py), each code as code + 8, or with minima as the code itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from compiled_kernels.linear.matrix_format import INT8_MATRIX, MatrixFormat
from compiled_kernels.linear.planes import pack_planes, unpack_planes
from compiled_kernels.linear.words import codes_of_words, quantize_words


def quantize_int8(weight: Float[Tensor, "out width"]) -> tuple[Int8[Tensor, "out width"], Float[Tensor, " out"]]:
    """Quantize a weight to values in -127..127 and float32 scales, one for each row, so that |weight - value * scale|
    <= scale / 2.
    """
    exact = weight.float()
    scales = (exact.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (exact / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def quantize_int4(
    weight: Float[Tensor, "out width"], group: int = 64
) -> tuple[Int32[Tensor, "out word"], Float[Tensor, "out column_group"]]:
    """Quantize a weight to words of values in -8..7, and float16 scales: the number of largest absolute value in a
    group becomes -8 or 7, by its sign."""
    if weight.shape[1] % group or group % 8:
        raise ValueError(f"INT4 groups of {group} do not divide {weight.shape[1]} columns, or are no multiple of 8")
    columns = rearrange(weight.float(), "out (column_group column) -> out column_group column", column=group)
    low, high = columns.amin(dim=-1, keepdim=True), columns.amax(dim=-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    # the first of equal values is needed; argmax finds it too, but takes five times as long
    equal = (high == -low)[..., 0]
    rows = columns[equal]
    largest[equal] = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True))
    scales = (largest / -8).half()
    exact = scales.float()
    values = (columns / exact.masked_fill(exact == 0, torch.inf)).round_().clamp_(-8, 7).add_(8)
    return pack_planes(values.to(torch.uint8).flatten(1), (4,)), scales[..., 0]


def quantize_matrix(weight: Float[Tensor, "out width"], format: MatrixFormat) -> tuple[Tensor, ...]:
    """Quantize a weight to the codes, scales and minima of a format. Codes span each group from its smallest to its
    largest number (without minima: up to its largest absolute number), and each number gets the nearest code."""
    if format == INT8_MATRIX:
        return quantize_int8(weight)
    if format.codes == "float16":
        return (weight.half(),)
    if format.words is not None:
        if problem := format.problem(weight.shape[1]):
            raise ValueError(f"{problem} {weight.shape[1]} columns")
        return quantize_words(weight, format.words)
    if format.codes == "int4" and format.scales == torch.float16 and format.minima is None:
        return quantize_int4(weight, format.group)
    rows, columns = weight.shape
    group = format.group or columns
    padded = F.pad(weight.float(), (0, -columns % group), mode="replicate")
    grouped = rearrange(padded, "out (column_group column) -> out column_group column", column=group)
    lowest, highest = {"int8": (-128, 127), "int4": (-8, 7), "fp8": (-448, 448)}[format.codes]
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    wanted = torch.maximum(-low, high) / highest if format.minima is None else (high - low) / (highest - lowest)
    scales = wanted.to(format.scales)
    if format.minima is not None and format.codes == "int4":
        lowest, highest = 0, 15
    minima = None if format.minima is None else (low - lowest * scales.float()).to(format.minima)
    away = grouped - (0.0 if minima is None else minima.float())
    numbers = torch.where(scales == 0, 0.0, away / scales.float()).clamp(lowest, highest)
    numbers = rearrange(numbers, "out column_group column -> out (column_group column)")[:, :columns]
    codes = numbers.to(torch.float8_e4m3fn) if format.codes == "fp8" else numbers.round().to(torch.int8)
    if format.codes == "int4":
        codes = pack_planes(codes - lowest, (4,))
    stored = [codes, scales[..., 0] if format.group else scales[:, 0, 0]]
    return tuple(stored if minima is None else [*stored, minima[..., 0]])


def dequantize_matrix(
    format: MatrixFormat, codes: Tensor, scales: Tensor, minima: Tensor | None = None
) -> Float[Tensor, "out width"]:
    """Return the matrix's numbers, `codes * scales + minima`, in float32; in float64 if the scales are float64."""
    codes, step, minimum = codes_of_matrix(format, codes, scales, minima)
    columns, numbers = codes.shape[1], codes.to(step.dtype)
    group = min(format.group or columns, columns)
    if missing := -columns % group:
        numbers = F.pad(numbers, (0, missing))
    numbers = numbers.unflatten(1, (-1, group)).mul_(step[..., None])
    return (numbers if minimum is None else numbers.add_(minimum[..., None])).flatten(1)[:, :columns]


def codes_of_matrix(
    format: MatrixFormat, codes: Tensor, scales: Tensor, minima: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return three tensors whose numbers give the matrix, number = code * factor + summand: the codes as numbers [out,
    width], and the factor and summand of each group of columns [out, group]. They are float32, or float64 if the scales
    are."""
    if format.words is not None:
        return codes_of_words(format.words, codes, scales, minima)
    exact = torch.promote_types(scales.dtype, torch.float32)
    if codes.dtype == torch.int32:
        codes = unpack_planes(codes, (4,)).view(torch.int8) - (8 if minima is None else 0)
    step = scales if format.group else scales[:, None]
    return codes, step.to(exact), None if minima is None else minima.to(exact)
