"""Products by experts in Triton: rows in the order of their experts, tiles of rows of one expert.

    out.T [out, row]  =  weight of the tile's expert [out, width]  @  x.T [width, row]

There is one tile for any number of rows and no split along the width, so a row's bits do not depend on which other rows
there are. Each program finds its tile's expert by itself from where the experts' rows end: the host knows only a bound
of the number of tiles, and nothing waits for it. Programs beyond the last tile return at once; an expert that no row
names has no tile, and is not read. Codes (see packed.py) are widened in registers, each times its scale; a byte of
4-bit codes is one of the even columns and one of the odd ones, which are two products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.blocked.layout import in_panels
from compiled_kernels.expert_linear.packed import stack_from_panels, stack_group, stack_kind
from compiled_kernels.triton_code.dots import dot, operand
from compiled_kernels.triton_code.launch import KernelLaunch, ceil_div, check, power_of_two, run

TILE = (64, 64, 64, 4)  # outputs, rows, columns of a step, warps
FLOAT32_TILE = (32, 32, 16, 4)  # float32 has no tensor cores here, and its tiles must fit the registers
MIN_DOT_SIZE = 16


DENSE, INT8, INT4, MXFP4 = (tl.constexpr(number) for number in range(4))
KINDS = {"dense": DENSE, "int8": INT8, "int4": INT4, "mxfp4": MXFP4}


@triton.jit
def values_of(codes, KIND: tl.constexpr):
    """Return the numbers of 4-bit codes in float32."""
    if KIND == INT4:
        return codes.to(tl.float32) - 8.0
    size = (codes & 7).to(tl.float32)  # E2M1: 0, 1, 2, 3, 4, 6, 8, 12 halves
    halves = size + tl.maximum(size - 4.0, 0.0) + 2.0 * tl.maximum(size - 6.0, 0.0)
    return halves * (0.5 - (codes >> 3).to(tl.float32))


@triton.jit
def scales_of(
    scales, line, start, groups, OUTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Load the scales of a step's `COLUMNS` from `start` on, each as often as it has values: [OUTS, WIDE]."""
    group = start // GROUP + tl.arange(0, COLUMNS // GROUP)
    stored = tl.load(scales + line[:, None] * groups + group[None, :], mask=(group < groups)[None, :], other=0)
    if KIND == MXFP4:
        wide = stored.to(tl.int32)
        special = (wide == 0) | (wide == 255)  # subnormal, and not a number
        scale = ((wide << 23) | (special.to(tl.int32) << 22)).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    scale = tl.broadcast_to(scale[:, :, None], [OUTS, COLUMNS // GROUP, WIDE * GROUP // COLUMNS])
    return tl.reshape(scale, [OUTS, WIDE])


@triton.jit
def columns_of(x, row, column, inside, width, x_stride, EVEN: tl.constexpr):
    """Load x.T of these columns and rows: [column, row]."""
    at = x + row[None, :] * x_stride + column[:, None]
    mask = inside[None, :] if EVEN else (column < width)[:, None] & inside[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def expert_product(
    x, weights, scales, bias, out, order, ends, experts, width, outs, x_stride,
    OUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows of one expert: `order` [row] is the rows in the order of their experts, `ends` [expert]
    where each expert's rows end in it. `GROUP` columns share a scale; 0 where a row has one."""
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
            if KIND >= INT4:
                byte = start // 2 + tl.arange(0, COLUMNS // 2)
                at = weights + line[:, None] * (width // 2) + byte[None, :]
                codes = tl.load(at) if EVEN else tl.load(at, mask=(byte < width // 2)[None, :], other=0)
                scale = scales_of(scales, line, start, width // GROUP, OUTS, COLUMNS, GROUP, COLUMNS // 2, KIND)
                low = operand(values_of(codes & 15, KIND) * scale, x.dtype.element_ty)
                high = operand(values_of(codes >> 4, KIND) * scale, x.dtype.element_ty)
                sums = dot(low, columns_of(x, row, 2 * byte, inside, width, x_stride, EVEN), sums)
                sums = dot(high, columns_of(x, row, 2 * byte + 1, inside, width, x_stride, EVEN), sums)
            else:
                column = start + tl.arange(0, COLUMNS)
                at = weights + line[:, None] * width + column[None, :]
                weight = tl.load(at) if EVEN else tl.load(at, mask=(column < width)[None, :], other=0)
                if GROUP:
                    scale = scales_of(scales, line, start, width // GROUP, OUTS, COLUMNS, GROUP, COLUMNS, KIND)
                    weight = weight.to(tl.float32) * scale
                values = columns_of(x, row, column, inside, width, x_stride, EVEN)
                sums = dot(operand(weight, x.dtype.element_ty), values, sums)
        if KIND == INT8 and GROUP == 0:
            sums *= tl.load(scales + line)[:, None]
        if BIAS:
            sums += tl.load(bias + line).to(tl.float32)[:, None]
        tl.store(out + row[None, :] * outs + o[:, None], sums, mask=inside[None, :] & (o < outs)[:, None])


def plan(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> tuple[list[KernelLaunch], Tensor]:
    check("expert_linear", x, weight if scales is None else None, bias)
    if in_panels(weight):  # a layout of the backend mlir: the named experts are made plain
        named, expert = expert.unique(return_inverse=True)
        bias = None if bias is None else bias[named]
        weight, scales = stack_from_panels(weight[named], None if scales is None else scales[named])
    kind, group = stack_kind(weight, scales), stack_group(weight, scales)
    if group != (power_of_two(group) if group else 0):
        raise BackendError(f"expert_linear: backend triton knows groups of a power of two columns, not {group}")
    x, weight = x if x.stride(1) == 1 else x.contiguous(), weight.contiguous()
    (rows, width), (experts, outs, _) = x.shape, weight.shape
    out = x.new_empty(rows, outs)
    of_rows, order = expert.sort(stable=True)
    ends = torch.searchsorted(of_rows, torch.arange(experts, device=expert.device, dtype=expert.dtype), right=True)
    block_outs, block_rows, columns, warps = TILE if x.dtype.itemsize == 2 else FLOAT32_TILE
    least = 2 * MIN_DOT_SIZE if kind in ("int4", "mxfp4") else MIN_DOT_SIZE
    columns = max(least, group, min(columns, power_of_two(width)))
    arguments = {
        "x": x, "weights": weight, "scales": x if scales is None else scales.contiguous(),
        "bias": x if bias is None else bias.contiguous(), "out": out, "order": order,
        "ends": ends, "experts": experts, "width": width, "outs": outs, "x_stride": x.stride(0),
        "OUTS": block_outs, "ROWS": block_rows, "COLUMNS": columns, "EXPERTS": power_of_two(experts),
        "EVEN": width % columns == 0, "BIAS": bias is not None, "KIND": KINDS[kind].value, "GROUP": group,
    }  # fmt: skip
    tiles = min(rows, experts + rows // block_rows)  # at most: each expert's last tile may be partly filled
    return [KernelLaunch(expert_product, (tiles, ceil_div(outs, block_outs)), arguments, warps, 4)], out


def expert_linear(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    return run(*plan(x, expert, weight, bias, scales))
