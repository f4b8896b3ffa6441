"""A product of activations in INT8 with weights in integer codes: x is quantized as it comes."""

from __future__ import annotations

import math
from functools import reduce

import torch
from einops import einsum
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.blocked.layout import PANEL, from_panels, in_panels
from compiled_kernels.linear.by_blocks import by_blocks
from compiled_kernels.linear.matrix_format import CODE_DTYPES, WORDS
from compiled_kernels.linear.planes import unpack_planes
from compiled_kernels.linear.words import codes_of_words
from compiled_kernels.operators import define_operator

BLOCK = 32  # columns of x that share a scale, beside a weight in groups (as in llama.cpp's Q8_0 and Q8_1)
COLUMNS = 1024  # of INT8 products, each at most 127 x 128, that sum to no more than float32 holds exactly: 2^24
MAX_EXACT_COLUMNS = 1 << 17  # columns whose products of two INT8 values, -128 among them, an int32 can sum


def quantize_rows(x: Float[Tensor, "*token width"]) -> tuple[Int8[Tensor, "*token width"], Float[Tensor, "*token"]]:
    """Return values in -127..127, rounded half to even, and scales of amax / 127 (float64 where `x` is that, float32
    otherwise), the smallest normal float32 at least: a row of zeros has values of zero.

    A row that holds a number that is not finite has a scale that is not, so nothing finite comes of it."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scales = (exact.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (exact / scales[..., None]).round().clamp(-127, 127).to(torch.int8), scales


def quantize_blocks(
    x: Float[Tensor, "token width"], block: int
) -> tuple[Int8[Tensor, "token width"], Float[Tensor, "token block"]]:
    """Quantize each `block` of columns of each row as `quantize_rows` does; the last may have fewer."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % block))
    values, scales = quantize_rows(padded.unflatten(1, (-1, block)))
    return values.flatten(1)[:, : x.shape[1]], scales


def rounded_to_int8(x: Float[Tensor, "token width"], by_row: bool) -> Float[Tensor, "token width"]:
    """Return the numbers that INT8 holds in place of x: by row, or by blocks of `BLOCK` columns."""
    width = x.shape[1]
    values, scales = quantize_blocks(x, width if by_row else BLOCK)
    return values * scales.to(x.dtype).repeat_interleave(width if by_row else BLOCK, 1)[:, :width]


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], len(weight) * (PANEL if in_panels(weight) else 1))


LINEAR_W8A8 = define_operator(
    "linear_w8a8",
    "(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? minima, str codes, int group) -> Tensor",
    _fake,
    {
        Backend.INDUCTOR: "compiled_kernels.linear_w8a8.api:by_groups",
        Backend.MLIR: "compiled_kernels.linear_w8a8.mlir:linear_w8a8",
    },
)


def linear_w8a8(
    x: Float[Tensor, "token width"],
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    minima: Tensor | None = None,
    codes: str = "int8",
    group: int = 0,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Return `rounded @ numbers.T + bias` in the type of `x`, where `rounded` is x as INT8 holds it (see
    `quantize_rows`), row by row beside a weight with a scale for a row, and else by blocks of `BLOCK` columns of a row.

    Codes are multiplied with INT8 as integers, and summed in int32 over columns that share all scales. These sums
    are exact, and join in the order of the width: a row has the same bits alone and among others, and on the backends
    eager and mlir at every level.

    Args:
        x: the rows.
        weight: codes of a matrix in few bits, row by row or in panels (see linear_int8, linear_grouped and
            linear_quantized in linear/api.py).
        scales: of the codes.
        bias: [out].
        minima: what is added to codes times scales, if the format has such.
        codes: `int8`, `int4`, or the name of a format of `matrix_format.WORDS`.
        group: columns that share a scale; 0: all of a row. That of a format in words is its own.
        backend: what computes it.

    Raises BackendError where codes are no integers, or a group or a row has a width that this cannot sum, and on a
    backend that does not carry this out."""
    if problem := int8_problem(codes, group, x.shape[1]):
        raise BackendError(f"linear_w8a8: {problem}")
    parts = (weight, scales, minima) if backend is Backend.MLIR else map(_plain, (weight, scales, minima))
    weight, scales, minima = parts  # type: ignore[assignment] (the first two are there)
    run = by_groups if backend is Backend.EAGER else LINEAR_W8A8.implementation(backend)
    return run(x, weight, scales, bias, minima, codes, min(group, x.shape[1]))


def int8_problem(codes: str, group: int, width: int) -> str | None:
    """Return why a matrix of such codes is not multiplied with activations in INT8; None where it is."""
    if codes not in ("int8", "int4", *WORDS):
        return f"INT8 activations are multiplied with integers, which codes of {codes} are not"
    if not group and width > MAX_EXACT_COLUMNS:
        return f"int32 sums are exact up to {MAX_EXACT_COLUMNS:,} columns, not for {width:,}"
    if group and codes in CODE_DTYPES and math.gcd(group, width) % 8:
        return f"INT8 activations want groups of multiples of 8 columns, not of {group} of {width:,}"
    return None


def _plain(part: Tensor | None) -> Tensor | None:
    return part if part is None else from_panels(part)


def by_groups(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, minima: Tensor | None, codes: str, group: int
) -> Tensor:
    """Multiply in plain torch, some rows of the matrix at a time: sums of integers of each group of columns that share
    all scales, times these scales, and minima times the sum of x of the group; added up in the order of the width."""
    width, columns = x.shape[1], WORDS[codes].group if codes in WORDS else group
    block, shared = (BLOCK, math.gcd(BLOCK, columns, width)) if columns else (width, width)
    values, of_x = quantize_blocks(x, block)
    rows, first = values.unflatten(1, (-1, shared)), torch.arange(0, width, shared, device=x.device)
    of_x = of_x.T[first // block, :, None]  # [group, token, 1]
    sums_of_x = rows.sum(-1, dtype=torch.int32).T[..., None].to(of_x.dtype) * of_x

    def multiply(weight: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None) -> Tensor:
        numbers, *beside = _integers(codes, weight, scales, minima)
        scale, *least = (each.T[first // (columns or width), None] for each in beside if each is not None)
        terms = [_exact_sums(rows, numbers.unflatten(1, (-1, shared))).to(of_x.dtype) * of_x * scale]
        terms += [sums_of_x * each for each in least]
        total = reduce(torch.add, (each for group in zip(*terms, strict=True) for each in group))
        return total if bias is None else total + bias.to(total.dtype)

    return by_blocks(x, (weight, scales, minima, bias), multiply)


def _integers(
    codes: str, weight: Tensor, scales: Tensor, minima: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the integers of a matrix [out, width], and what multiplies them and is then added [out, group], float32 at
    least."""
    if codes in WORDS:
        return codes_of_words(WORDS[codes], weight, scales, minima)
    exact = torch.promote_types(scales.dtype, torch.float32)
    numbers = unpack_planes(weight, (4,)).view(torch.int8) if codes == "int4" else weight
    offset = 8 if codes == "int4" and minima is None else 0
    by_group = scales[:, None] if scales.ndim == 1 else scales
    return numbers - offset if offset else numbers, by_group.to(exact), None if minima is None else minima.to(exact)


def _exact_sums(rows: Int8[Tensor, "token group column"], numbers: Tensor) -> Int32[Tensor, "group token out"]:
    """Float32 products of `COLUMNS` columns are exact whatever the order of their sums, so a library may make them;
    their sums are joined as integers."""
    parts = zip(rows.split(COLUMNS, dim=2), numbers.split(COLUMNS, dim=2), strict=True)
    pattern = "token group column, out group column -> group token out"
    return reduce(torch.add, (einsum(a.float(), b.float(), pattern).to(torch.int32) for a, b in parts))


def linear_w8a8_reference(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Float64 holds every sum of products of INT8 exactly, in whatever order it is added up."""
    rows, row_scales = quantize_rows(x)
    sums = einsum(rows.double(), values.double(), "token width, out width -> token out").to(torch.int64)
    out = sums.to(row_scales.dtype) * row_scales[:, None] * scales.to(row_scales.dtype)
    return (out if bias is None else out + bias.to(out.dtype)).to(x.dtype)
