"""A product of activations in INT8 with weights in INT8 (W8A8): each row of x is quantized as it comes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int8
from torch import Tensor

from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.blocked.layout import from_panels, shape_of
from compiled_kernels.linear.by_blocks import by_blocks
from compiled_kernels.operators import define_operator

COLUMNS = 1024  # of INT8 products, each at most 127 x 128, that sum to no more than float32 holds exactly: 2^24
MAX_EXACT_COLUMNS = 1 << 17  # columns whose products of two INT8 values, -128 among them, an int32 can sum


def quantize_rows(x: Float[Tensor, "token width"]) -> tuple[Int8[Tensor, "token width"], Float[Tensor, " token"]]:
    """Return values in -127..127, rounded half to even, and scales of amax / 127 (float64 where `x` is that, float32
    otherwise), the smallest normal float32 at least: a row of zeros has values of zero.

    A row that holds a number that is not finite has a scale that is not, so nothing finite comes of it."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scales = (exact.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (exact / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def _fake(x: Tensor, values: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], shape_of(values)[0])


LINEAR_W8A8 = define_operator(
    "linear_w8a8",
    "(Tensor x, Tensor values, Tensor scales, Tensor? bias) -> Tensor",
    _fake,
    {
        Backend.INDUCTOR: "compiled_kernels.linear_w8a8.api:linear_w8a8_by_blocks",
        Backend.MLIR: "compiled_kernels.linear_w8a8.mlir:linear_w8a8",
    },
)


def linear_w8a8(
    x: Float[Tensor, "token width"],
    values: Int8[Tensor, "out width"] | Int8[Tensor, "panel row column value"],
    scales: Float[Tensor, " out"],
    bias: Tensor | None = None,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token out"]:
    """Return (rows @ values.T) * row_scales * scales + bias in the type of `x`, where `rows` and `row_scales` are x in
    INT8 (see `quantize_rows`) and the product is one of integers with int32 sums.

    Sums are exact and each row is quantized by itself, so a row has the same bits alone and among others; the backends
    eager and mlir give the same bits at every level. Raises BackendError where a row is wider than an int32 can sum,
    and on a backend that does not carry this out."""
    width = shape_of(values)[1]
    if width > MAX_EXACT_COLUMNS:
        raise BackendError(f"linear_w8a8: int32 sums are exact up to {MAX_EXACT_COLUMNS:,} columns, not for {width:,}")
    values = values if backend is Backend.MLIR else from_panels(values)
    run = linear_w8a8_by_blocks if backend is Backend.EAGER else LINEAR_W8A8.implementation(backend)
    return run(x, values, scales, bias)


def linear_w8a8_by_blocks(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by torch's own operations. Float32 products of `COLUMNS` columns are exact whatever the order of their
    sums, so a library may make them; their sums are joined as integers."""
    rows, row_scales = quantize_rows(x)

    def multiply(values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        parts = zip(rows.split(COLUMNS, dim=1), values.split(COLUMNS, dim=1), strict=True)
        sums = sum(
            (F.linear(row.float(), value.float()).to(torch.int32) for row, value in parts), start=torch.tensor(0)
        )
        return _scaled(sums, row_scales, scales, bias)

    return by_blocks(x, (values, scales, bias), multiply)


def linear_w8a8_reference(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Float64 holds every sum of products of INT8 exactly, in whatever order it is added up."""
    rows, row_scales = quantize_rows(x)
    sums = einsum(rows.double(), values.double(), "token width, out width -> token out").to(torch.int64)
    return _scaled(sums, row_scales, scales, bias).to(x.dtype)


def _scaled(sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    out = sums.to(row_scales.dtype) * row_scales[:, None] * scales.to(row_scales.dtype)
    return out if bias is None else out + bias.to(out.dtype)
