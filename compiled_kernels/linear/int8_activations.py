"""Quantize activations to INT8 at run time, and multiply them by integer codes in integer arithmetic.

Products are summed in int32 over columns that share all scales. These sums are exact, and are combined in the order of
the columns: a row has the same bits alone and in a batch, and on the backends eager and mlir at every level."""

from __future__ import annotations

import math
from functools import reduce

import torch
from einops import einsum
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from compiled_kernels.linear.by_blocks import by_blocks
from compiled_kernels.linear.matrix_format import CODE_DTYPES, WORDS, MatrixFormat
from compiled_kernels.linear.quantize import codes_of_matrix

BLOCK = 32  # columns of x that share a scale, with a weight in groups (as in llama.cpp's Q8_0 and Q8_1)
COLUMNS = 1024  # INT8 products of at most 127 x 128 whose sum float32 holds exactly (2^24)
MAX_EXACT_COLUMNS = 1 << 17  # INT8 products, -128 included, whose sum an int32 holds


def quantize_rows(x: Float[Tensor, "*token width"]) -> tuple[Int8[Tensor, "*token width"], Float[Tensor, "*token"]]:
    """Return each row's values in -127..127, rounded half to even, and its scale amax / 127 (float64 if `x` is float64,
    else float32). A scale is at least the smallest normal float32, so that a row of zeros has values of zero. The scale
    of a row with a number that is not finite is not finite either, and so are all of its results."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scales = (exact.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (exact / scales[..., None]).round().clamp(-127, 127).to(torch.int8), scales


def quantize_blocks(
    x: Float[Tensor, "token width"], block: int
) -> tuple[Int8[Tensor, "token width"], Float[Tensor, "token block"]]:
    """Quantize each `block` of columns of each row as `quantize_rows` does; the last block may be shorter."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % block))
    values, scales = quantize_rows(padded.unflatten(1, (-1, block)))
    return values.flatten(1)[:, : x.shape[1]], scales


def rounded_to_int8(x: Float[Tensor, "token width"], by_row: bool) -> Float[Tensor, "token width"]:
    """Return x after rounding to INT8 and back: with a scale for each row, or for each block of `BLOCK` columns."""
    width = x.shape[1]
    values, scales = quantize_blocks(x, width if by_row else BLOCK)
    return values * scales.to(x.dtype).repeat_interleave(width if by_row else BLOCK, 1)[:, :width]


def int8_problem(codes: str, group: int, width: int) -> str | None:
    """Return why a matrix with these codes cannot be multiplied with INT8 activations; None if it can."""
    if codes not in ("int8", "int4", *WORDS):
        return f"INT8 activations need integer codes, which {codes} are not"
    if not group and width > MAX_EXACT_COLUMNS:
        return f"int32 sums are exact up to {MAX_EXACT_COLUMNS:,} columns, not for {width:,}"
    if group and codes in CODE_DTYPES and math.gcd(group, width) % 8:
        return f"INT8 activations need groups in multiples of 8 columns, not {group} of {width:,}"
    return None


def multiply_int8(x: Tensor, format: MatrixFormat, matrix: tuple[Tensor | None, ...], bias: Tensor | None) -> Tensor:
    """Multiply x in INT8 by a quantized matrix in plain torch, some rows of the matrix at a time. For each group of
    columns that share all scales, the result is the integer sum times these scales, plus the minimum times the group's
    sum of x; groups are added in the order of columns."""
    width, columns = x.shape[1], min(format.group, x.shape[1])
    block, shared = (BLOCK, math.gcd(BLOCK, columns, width)) if columns else (width, width)
    values, of_x = quantize_blocks(x, block)
    rows, first = values.unflatten(1, (-1, shared)), torch.arange(0, width, shared, device=x.device)
    of_x = of_x.T[first // block, :, None]  # [group, token, 1]
    sums_of_x = rows.sum(-1, dtype=torch.int32).T[..., None].to(of_x.dtype) * of_x

    def multiply(weight: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None) -> Tensor:
        numbers, *beside = codes_of_matrix(format, weight, scales, minima)
        scale, *minimum = (each.T[first // (columns or width), None] for each in beside if each is not None)
        terms = [_exact_sums(rows, numbers.unflatten(1, (-1, shared))).to(of_x.dtype) * of_x * scale]
        terms += [sums_of_x * each for each in minimum]
        total = reduce(torch.add, (each for group in zip(*terms, strict=True) for each in group))
        return total if bias is None else total + bias.to(total.dtype)

    return by_blocks(x, (*matrix, bias), multiply)


def _exact_sums(rows: Int8[Tensor, "token group column"], numbers: Tensor) -> Int32[Tensor, "group token out"]:
    """Sum products exactly: float32 products of `COLUMNS` columns are exact in any order, so that a library may compute
    them; their sums are added as integers."""
    parts = zip(rows.split(COLUMNS, dim=2), numbers.split(COLUMNS, dim=2), strict=True)
    pattern = "token group column, out group column -> group token out"
    return reduce(torch.add, (einsum(a.float(), b.float(), pattern).to(torch.int32) for a, b in parts))


def int8_reference(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the reference product of x in INT8: float64 holds every sum of INT8 products exactly, in any order."""
    rows, row_scales = quantize_rows(x)
    sums = einsum(rows.double(), values.double(), "token width, out width -> token out").to(torch.int64)
    out = sums.to(row_scales.dtype) * row_scales[:, None] * scales.to(row_scales.dtype)
    return (out if bias is None else out + bias.to(out.dtype)).to(x.dtype)
