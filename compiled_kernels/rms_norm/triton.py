"""Compute RMS norm in Triton with one program for each row, which keeps the whole row in registers: it is read once and
written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.triton_code.launch import KernelLaunch, check, power_of_two, run

NUMBERS_A_WARP = 512  # sixteen a thread: a row is as many warps wide, up to sixteen


@triton.jit
def norm_rows(
    x, residual, weight, total, out, width, eps, x_row, x_column, residual_row, residual_column, out_row, out_column,
    WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    values = tl.load(x + row * x_row + columns * x_column, mask=inside, other=0.0)
    if ADD:
        added = tl.load(residual + row * residual_row + columns * residual_column, mask=inside, other=0.0)
        # The norm is computed from the sum rounded to its stored type.
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        tl.store(total + row * out_row + columns * out_column, values, mask=inside)
    exact = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / width + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + columns * out_column, exact * scale * weights, mask=inside)


def plan(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[list[KernelLaunch], tuple[Tensor, Tensor]]:
    """Plan the launches and allocate the outputs: the sum of `x` and `residual` (`x` itself if there is no residual),
    and its norm.
    """
    check("rms_norm" if residual is None else "add_rms_norm", x, residual, weight)
    tokens, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(out)
    other = x if residual is None else residual
    padded = power_of_two(width)
    arguments = {
        "x": x, "residual": other, "weight": weight.contiguous(), "total": total, "out": out, "width": width,
        "eps": eps, "x_row": x.stride(0), "x_column": x.stride(1), "residual_row": other.stride(0),
        "residual_column": other.stride(1), "out_row": out.stride(0), "out_column": out.stride(1),
        "WIDTH": padded, "ADD": residual is not None,
    }  # fmt: skip
    warps = min(16, max(1, padded // NUMBERS_A_WARP))
    return [KernelLaunch(norm_rows, (tokens,), arguments, warps)], (total, out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return run(*plan(x, None, weight, eps))[1]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return run(*plan(x, residual, weight, eps))
