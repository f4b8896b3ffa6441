"""Products with weight matrices in Triton, also batch-invariant ones; by default dense products are the vendor's.

One row is a multiply-reduce that streams the weights past it. More rows go through the tensor cores, the weights as the
left operand: they are widened in registers and never lie in memory.

    out.T [out, token]  =  weights [out, width]  @  x.T [width, token]

Where a product has too few tiles to fill the device, its width is split and `add_parts` sums the parts.

`plan_batch_invariant` has one tile for any number of rows and no split along the width, so a row's bits do not depend
on the batch composition. Dense weights then go through the kernel of quantized ones, their values times a scale of one,
so that no library chooses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.triton_code.dots import dot, operand
from compiled_kernels.triton_code.launch import (
    KernelLaunch,
    ceil_div,
    check,
    floor_power_of_two,
    num_processors,
    power_of_two,
    run,
)

ROW_BYTES = 8192  # of INT8 weights, half of INT4, that a program has under way in the one-row kernels
PROGRAMS_FOR_WIDE_TILES = (
    4 * 8
)  # programs a processor from which a program takes twice the rows, and reads x half as often
MEMORY_BOUND_ROWS = 32  # rows up to which a product waits for memory
MIN_DOT_SIZE = 16
NUMBERS_PER_PROGRAM = 1024  # numbers a program of `add_parts`
INVARIANT_TILE = (64, 64, 64, 4)  # outputs, tokens, bytes of a step, warps
INVARIANT_FLOAT32_TILE = (32, 32, 16, 4)  # float32 has no tensor cores here, and its tiles must fit the registers


@triton.jit
def one_row_int8(
    x, values, scales, bias, out, width, outs, OUTS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    line = tl.minimum(o, outs - 1).to(tl.int64)  # past the end the last one is read again, and not stored
    sums = tl.zeros([OUTS, COLUMNS], tl.float32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        at = values + line[:, None] * width + column[None, :]
        if EVEN:
            weights, row = tl.load(at), tl.load(x + column)
        else:
            weights = tl.load(at, mask=(column < width)[None, :], other=0)
            row = tl.load(x + column, mask=column < width, other=0.0)
        sums += weights.to(tl.float32) * row.to(tl.float32)[None, :]
    result = tl.sum(sums, axis=1) * tl.load(scales + line).to(tl.float32)
    if BIAS:
        result += tl.load(bias + line).to(tl.float32)
    tl.store(out + o, result, mask=o < outs)


@triton.jit
def one_row_int4(
    x, packed, scales, bias, out, groups, outs, OUTS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply one row by INT4 weights. A byte of group g holds columns i and i + HALF of it; codes are 8 too large,
    which x pays back once for all rows: sum((code - 8) x) = sum(code x) - sum(8 x)."""
    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    line = tl.minimum(o, outs - 1).to(tl.int64)
    sums = tl.zeros([OUTS, GROUPS, HALF], tl.float32)
    byte = tl.arange(0, HALF)[None, :]
    for begin in range(0, groups, GROUPS):
        group = begin + tl.arange(0, GROUPS)
        column = group[:, None] * (2 * HALF) + byte
        at = packed + line[:, None, None] * (groups * HALF) + (group[:, None] * HALF + byte)[None, :, :]
        scale_at = scales + line[:, None] * groups + group[None, :]
        if EVEN:
            codes, scale = tl.load(at), tl.load(scale_at)
            low, high = tl.load(x + column), tl.load(x + column + HALF)
        else:
            inside = (group < groups)[:, None]
            codes = tl.load(at, mask=inside[None, :, :], other=0)
            scale = tl.load(scale_at, mask=(group < groups)[None, :], other=0.0)
            low = tl.load(x + column, mask=inside, other=0.0)
            high = tl.load(x + column + HALF, mask=inside, other=0.0)
        low, high = low.to(tl.float32), high.to(tl.float32)
        over = 8.0 * (low + high)
        part = (codes & 15).to(tl.float32) * low[None, :, :] - over[None, :, :]
        part += (codes >> 4).to(tl.float32) * high[None, :, :]
        sums += part * scale.to(tl.float32)[:, :, None]
    result = tl.sum(tl.sum(sums, axis=2), axis=1)
    if BIAS:
        result += tl.load(bias + line).to(tl.float32)
    tl.store(out + o, result, mask=o < outs)


@triton.jit
def columns_of(x, token, column, width, x_stride, EVEN: tl.constexpr):
    """Load x.T of these columns: [column, token]."""
    at = x + token[None, :] * x_stride + column[:, None]
    return tl.load(at) if EVEN else tl.load(at, mask=(column < width)[:, None], other=0.0)


@triton.jit(do_not_specialize=["tokens", "steps"])  # one kernel for all numbers of rows
def product(
    x, weights, scales, bias, out, parts, tokens, width, outs, x_stride, steps,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, BYTES: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of out.T over `steps` tiles of `BYTES` weight bytes a row; HALF 0 is INT8, else half an INT4
    group."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)  # neighbours share the weights
    o = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    token = tl.minimum(t, tokens - 1).to(tl.int64)
    line = tl.minimum(o, outs - 1).to(tl.int64)
    stride = width // 2 if HALF else width  # bytes a row of weights
    sums = tl.zeros([OUTS, TOKENS], tl.float32)
    for step in range(split * steps, (split + 1) * steps):
        byte = step * BYTES + tl.arange(0, BYTES)
        at = weights + line[:, None] * stride + byte[None, :]
        codes = tl.load(at) if EVEN else tl.load(at, mask=(byte < stride)[None, :], other=0)
        if HALF:
            group = step * (BYTES // HALF) + tl.arange(0, BYTES // HALF)
            scale_at = scales + line[:, None] * (stride // HALF) + group[None, :]
            scale = tl.load(scale_at) if EVEN else tl.load(scale_at, mask=(group * HALF < stride)[None, :], other=0.0)
            wide = tl.broadcast_to(scale.to(tl.float32)[:, :, None], [OUTS, BYTES // HALF, HALF])
            wide = tl.reshape(wide, [OUTS, BYTES])
            low = operand(((codes & 15).to(tl.float32) - 8.0) * wide, x.dtype.element_ty)
            high = operand(((codes >> 4).to(tl.float32) - 8.0) * wide, x.dtype.element_ty)
            column = byte // HALF * (2 * HALF) + byte % HALF
            sums = dot(low, columns_of(x, token, column, width, x_stride, EVEN), sums)
            sums = dot(high, columns_of(x, token, column + HALF, width, x_stride, EVEN), sums)
        else:
            sums = dot(operand(codes, x.dtype.element_ty), columns_of(x, token, byte, width, x_stride, EVEN), sums)
    if not HALF:
        sums *= tl.load(scales + line).to(tl.float32)[:, None]
    at = token[None, :] * outs + line[:, None]
    inside = (t < tokens)[None, :] & (o < outs)[:, None]
    if SPLIT:
        tl.store(parts + split.to(tl.int64) * tokens * outs + at, sums, mask=inside)
    else:
        if BIAS:
            sums += tl.load(bias + line).to(tl.float32)[:, None]
        tl.store(out + at, sums, mask=inside)


@triton.jit(do_not_specialize=["numbers", "splits"])
def add_parts(
    parts, bias, out, numbers, outs, splits, SPLITS: tl.constexpr, NUMBERS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    split = tl.arange(0, SPLITS)
    inside = (split < splits)[:, None] & (at < numbers)[None, :]
    part = tl.load(parts + split.to(tl.int64)[:, None] * numbers + at[None, :], mask=inside, other=0.0)
    result = tl.sum(part, axis=0)
    if BIAS:
        result += tl.load(bias + at % outs, mask=at < numbers, other=0.0).to(tl.float32)
    tl.store(out + at, result, mask=at < numbers)


def plan_int8(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, splits: int | None = None
) -> tuple[list[KernelLaunch], Tensor]:
    check("linear_int8", x, scales, bias)
    x, values, outs, out = _prepared(x, values)
    arguments = {"x": x, "scales": scales, "bias": x if bias is None else bias, "out": out, "outs": outs}
    arguments["BIAS"] = bias is not None
    width = x.shape[1]
    if x.shape[0] > 1 or splits:
        return _products(arguments, values, 0, splits), out
    rows = _rows(outs, x.device)
    columns = min(ROW_BYTES // rows, power_of_two(width))
    arguments |= {"values": values, "width": width, "OUTS": rows, "COLUMNS": columns, "EVEN": width % columns == 0}
    return [KernelLaunch(one_row_int8, (ceil_div(outs, rows),), arguments)], out


def plan_int4(
    x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, splits: int | None = None
) -> tuple[list[KernelLaunch], Tensor]:
    check("linear_int4", x, scales, bias)
    groups = scales.shape[1]
    half = packed.shape[1] // groups
    if half != power_of_two(half):
        raise BackendError(f"linear_int4: backend triton knows groups of a power of two columns, not {2 * half}")
    x, packed, outs, out = _prepared(x, packed)
    arguments = {"x": x, "scales": scales.contiguous(), "bias": x if bias is None else bias, "out": out, "outs": outs}
    arguments["BIAS"] = bias is not None
    if x.shape[0] > 1 or splits:
        return _products(arguments, packed, half, splits), out
    rows = _rows(outs, x.device)
    together = max(1, min(ROW_BYTES // 2 // rows // half, power_of_two(groups)))
    arguments |= {"packed": packed, "groups": groups, "OUTS": rows, "GROUPS": together, "HALF": half}
    arguments["EVEN"] = groups % together == 0
    return [KernelLaunch(one_row_int4, (ceil_div(outs, rows),), arguments)], out


def _prepared(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, weights.contiguous(), weights.shape[0], x.new_empty(x.shape[0], weights.shape[0])


def _rows(outs: int, device: torch.device) -> int:
    """Return the rows of weights that a program of the one-row kernels takes."""
    return 8 if outs >= 8 * PROGRAMS_FOR_WIDE_TILES * num_processors(device) else 4


def _products(arguments: dict[str, Any], weights: Tensor, half: int, splits: int | None) -> list[KernelLaunch]:
    x, out, outs = arguments["x"], arguments["out"], arguments["outs"]
    tokens, width = x.shape
    few, narrow = tokens <= MEMORY_BOUND_ROWS, x.dtype.itemsize == 2
    # Few rows: small tiles of long reads. Many: two warp groups of 64 outputs by up to 128 rows. float32 has no tensor
    # cores here, and its tiles must fit the registers of plain arithmetic.
    tensor_cores = (64, MEMORY_BOUND_ROWS, 128, 4) if few else (128, 128, 64, 8)
    block_outs, most_tokens, size, warps = tensor_cores if narrow else (32, MEMORY_BOUND_ROWS, 16, 4)
    block_tokens = min(most_tokens, power_of_two(tokens, MIN_DOT_SIZE))
    size = max(half, MIN_DOT_SIZE, min(size, power_of_two(weights.shape[1])))
    steps = ceil_div(weights.shape[1], size)
    tiles = ceil_div(tokens, block_tokens) * ceil_div(outs, block_outs)
    wanted = 2 * num_processors(x.device) if few else num_processors(x.device)
    parts = splits or min(8, floor_power_of_two(wanted // tiles), floor_power_of_two(steps // 4))
    each = ceil_div(steps, parts)
    split = parts > 1
    numbers = tokens * outs
    arguments |= {
        "weights": weights, "tokens": tokens, "width": width, "x_stride": x.stride(0), "steps": each,
        "parts": x.new_empty((parts, numbers), dtype=torch.float32) if split else out,
        "OUTS": block_outs, "TOKENS": block_tokens, "BYTES": size, "HALF": half,
        "EVEN": weights.shape[1] % (size * parts) == 0, "SPLIT": split,
    }  # fmt: skip
    grid = (ceil_div(tokens, block_tokens), ceil_div(outs, block_outs), parts)
    found = [KernelLaunch(product, grid, arguments, num_warps=warps, num_stages=4)]
    if split:
        shared = {name: arguments[name] for name in ("parts", "bias", "out", "outs", "BIAS")}
        block = max(1, NUMBERS_PER_PROGRAM // power_of_two(parts))
        shared |= {"numbers": numbers, "splits": parts, "SPLITS": power_of_two(parts), "NUMBERS": block}
        found.append(KernelLaunch(add_parts, (ceil_div(numbers, block),), shared))
    return found


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the vendor's product, on a GPU cuBLAS: no dense product is written here. Under Triton's interpreter it
    is that of the processor."""
    check("linear", x, weight, bias)
    return F.linear(x, weight, bias)


def linear_int8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return run(*plan_int8(x, values, scales, bias))


def linear_int4(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return run(*plan_int4(x, packed, scales, bias))


def plan_batch_invariant(
    x: Tensor, weights: Tensor, scales: Tensor | None, bias: Tensor | None
) -> tuple[list[KernelLaunch], Tensor]:
    """Plan x times `weights`: dense without `scales`, INT8 with one a row, INT4 (uint8) with one a group of columns."""
    check("linear", x, scales, bias)
    width, outs, half = x.shape[1], weights.shape[0], 0
    if weights.dtype == torch.uint8 and scales is not None:
        half = weights.shape[1] // scales.shape[1]
        if half != power_of_two(half):
            raise BackendError(f"linear_int4: backend triton knows groups of a power of two columns, not {2 * half}")
    scales = torch.ones(outs, device=x.device) if scales is None else scales.contiguous()
    x, weights = x if x.stride(1) == 1 else x.contiguous(), weights.contiguous()
    out = x.new_empty(x.shape[0], outs)
    block_outs, block_tokens, size, warps = INVARIANT_TILE if x.dtype.itemsize == 2 else INVARIANT_FLOAT32_TILE
    size = max(half, MIN_DOT_SIZE, min(size, power_of_two(weights.shape[1])))
    arguments = {
        "x": x, "weights": weights, "scales": scales, "bias": x if bias is None else bias, "out": out, "parts": out,
        "tokens": x.shape[0], "width": width, "outs": outs, "x_stride": x.stride(0),
        "steps": ceil_div(weights.shape[1], size), "OUTS": block_outs, "TOKENS": block_tokens, "BYTES": size,
        "HALF": half, "EVEN": weights.shape[1] % size == 0, "BIAS": bias is not None, "SPLIT": False,
    }  # fmt: skip
    grid = (ceil_div(x.shape[0], block_tokens), ceil_div(outs, block_outs), 1)
    return [KernelLaunch(product, grid, arguments, num_warps=warps, num_stages=4)], out
