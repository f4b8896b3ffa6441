"""Multiply each row by the weight of its expert in Triton: rows are sorted by expert, and a tile has rows of one
expert.

    out.T [out, row]  =  weight of the tile's expert [out, width]  @  x.T [width, row]

The tile's shape does not depend on the number of rows, and the width is not split, so a row's bits do not depend on
other rows. Each program finds its tile's expert from the ends of the experts' rows: the host only knows an upper bound
of the number of tiles and does not wait. Programs beyond the last tile return at once; an expert without rows has no
tile and is not read. Codes become numbers in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.blocked.layout import in_panels
from compiled_kernels.expert_linear.stacks import of_expert, stack_format
from compiled_kernels.linear.triton import StoredWeights
from compiled_kernels.linear.triton_kernels import weights_of
from compiled_kernels.triton_code.dots import dot, operand
from compiled_kernels.triton_code.launch import KernelLaunch, ceil_div, check, power_of_two, run

TILE = (64, 64, 64, 4)  # outputs, rows, columns of a step, warps
FLOAT32_TILE = (32, 32, 16, 4)  # float32 has no tensor cores here, and its tiles must fit the registers
MIN_DOT_SIZE = 16


@triton.jit
def columns_of(x, row, column, inside, width, x_stride, EVEN: tl.constexpr):
    """Load x.T [column, row] for these columns and rows."""
    at = x + row[None, :] * x_stride + column[:, None]
    mask = inside[None, :] if EVEN else (column < width)[:, None] & inside[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def expert_product(
    x, weights, scales, minima, bias, out, order, ends, experts, width, outs, x_stride,
    OUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, GROUP: tl.constexpr,
    FOUR: tl.constexpr, FP8: tl.constexpr, MINIMA: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows of one expert. `order` [row] lists the rows sorted by expert, `ends` [expert] the end of
    each expert's rows in that list. `SCALED`: each row of the matrix has a scale."""
    number = tl.arange(0, EXPERTS)
    there = number < experts
    end = tl.load(ends + number, mask=there, other=0).to(tl.int32)
    begin = tl.load(ends + number - 1, mask=there & (number > 0), other=0).to(tl.int32)
    tiles = tl.where(there, (end - begin + ROWS - 1) // ROWS, 0)
    after = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((there & (after <= tile)).to(tl.int32), 0)
    if expert < experts:
        mine = number == expert
        place = tl.sum(tl.where(mine, begin + (tile - after + tiles) * ROWS, 0), 0) + tl.arange(0, ROWS)
        inside = place < tl.sum(tl.where(mine, end, 0), 0)
        row = tl.load(order + place, mask=inside, other=0).to(tl.int64)
        o = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        line = expert.to(tl.int64) * outs + tl.minimum(o, outs - 1)
        sums = tl.zeros([OUTS, ROWS], tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            step = start // COLUMNS
            weight = weights_of(
                weights, scales, minima, line, step, width, COLUMNS, GROUP, FOUR, FP8, MINIMA, FORMAT, EVEN
            )  # fmt: skip
            values = columns_of(x, row, column, inside, width, x_stride, EVEN)
            sums = dot(operand(weight, x.dtype.element_ty), values, sums)
        if SCALED:
            sums *= tl.load(scales + line)[:, None]
        if BIAS:
            sums += tl.load(bias + line).to(tl.float32)[:, None]
        tl.store(out + row[None, :] * outs + o[:, None], sums, mask=inside[None, :] & (o < outs)[:, None])


def plan(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None,
    minima: Tensor | None = None, codes: str = "dense",
) -> tuple[list[KernelLaunch], Tensor]:  # fmt: skip
    check("expert_linear", x, weight if scales is None else None, bias)
    try:
        format = stack_format(codes, x.shape[1], scales, minima)
    except ValueError as error:
        raise BackendError(f"expert_linear: {error}") from None
    if in_panels(weight):  # a layout of the backend mlir: convert the experts in use to plain weights
        named, expert = expert.unique(return_inverse=True)
        bias = None if bias is None else bias[named]
        weight, scales, minima = of_expert((weight, scales, minima), named)
    group = format.group
    if group != (power_of_two(group) if group else 0):
        raise BackendError(f"expert_linear: backend triton needs groups of a power of two columns, not {group}")
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, width), (experts, outs, _) = x.shape, weight.shape
    out = x.new_empty(rows, outs)
    of_rows, order = expert.sort(stable=True)
    ends = torch.searchsorted(of_rows, torch.arange(experts, device=expert.device, dtype=expert.dtype), right=True)
    block_outs, block_rows, columns, warps = TILE if x.dtype.itemsize == 2 else FLOAT32_TILE
    columns = max(2 * MIN_DOT_SIZE if format.words else MIN_DOT_SIZE, group, min(columns, power_of_two(width)))
    scales, minima = (None if each is None else each.contiguous() for each in (scales, minima))
    stored = StoredWeights(weight, x if scales is None else scales, minima, group, format.words)
    arguments = {
        "x": x, "bias": x if bias is None else bias.contiguous(), "out": out, "order": order,
        "ends": ends, "experts": experts, "width": width, "outs": outs, "x_stride": x.stride(0),
        "OUTS": block_outs, "ROWS": block_rows, "COLUMNS": columns, "EXPERTS": power_of_two(experts),
        "EVEN": width % columns == 0, "BIAS": bias is not None, "SCALED": format.scales_rows, **stored.arguments,
    }  # fmt: skip
    tiles = min(rows, experts + rows // block_rows)  # at most: each expert's last tile may be partly filled
    return [KernelLaunch(expert_product, (tiles, ceil_div(outs, block_outs)), arguments, warps, 4)], out


def expert_linear(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None,
    minima: Tensor | None = None, codes: str = "dense",
) -> Tensor:  # fmt: skip
    return run(*plan(x, expert, weight, bias, scales, minima, codes))
