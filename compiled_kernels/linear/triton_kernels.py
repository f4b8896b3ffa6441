"""Kernels of products with weights of few bits: one row as a multiply-reduce, more rows on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_kernels.triton_code.dots import dot, operand


@triton.jit
def widened(codes, FP8: tl.constexpr):
    """Return 8-bit codes as float32: int8, or the bytes of E4M3 (not NaN), whose sign, exponent and fraction are moved
    to their places in float16, where they are 256 times too small."""
    if FP8:
        halves = (codes & 127).to(tl.uint16) << 7 | (codes & 128).to(tl.uint16) << 8
        return halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return codes.to(tl.float32)


@triton.jit
def one_row(
    x, values, scales, bias, out, width, outs, OUTS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply one row by 8-bit codes with a scale a row of weights."""
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
        sums += widened(weights, FP8) * row.to(tl.float32)[None, :]
    result = tl.sum(sums, axis=1) * tl.load(scales + line).to(tl.float32)
    if BIAS:
        result += tl.load(bias + line).to(tl.float32)
    tl.store(out + o, result, mask=o < outs)


@triton.jit
def one_row_grouped(
    x, weights, scales, minima, bias, out, width, groups, outs,
    OUTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr, FP8: tl.constexpr,
    MINIMA: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply one row by codes with a scale for each group of `GROUP` bytes. With `FOUR` a byte of a group holds
    columns i and i + GROUP of it. Such codes are 8 too large where there are no minima, which x pays back once for all
    rows: sum((code - 8) x) = sum(code x) - sum(8 x)."""
    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    line = tl.minimum(o, outs - 1).to(tl.int64)
    stride = width // 2 if FOUR else width
    sums = tl.zeros([OUTS, GROUPS, GROUP], tl.float32)
    for begin in range(0, groups, GROUPS):
        group = begin + tl.arange(0, GROUPS)
        byte = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        column = group[:, None] * (2 * GROUP) + tl.arange(0, GROUP)[None, :] if FOUR else byte
        at = weights + line[:, None, None] * stride + byte[None, :, :]
        scale_at = line[:, None] * groups + group[None, :]
        if EVEN:
            loaded, scale, low = tl.load(at), tl.load(scales + scale_at), tl.load(x + column)
        else:
            inside, known = byte < stride, (group < groups)[None, :]
            loaded = tl.load(at, mask=inside[None, :, :], other=0)
            scale = tl.load(scales + scale_at, mask=known, other=0.0)
            low = tl.load(x + column, mask=inside, other=0.0)
        low = low.to(tl.float32)
        added = low
        if FOUR:
            high = tl.load(x + column + GROUP) if EVEN else tl.load(x + column + GROUP, mask=byte < stride, other=0.0)
            high = high.to(tl.float32)
            added = low + high
            part = (loaded & 15).to(tl.float32) * low[None, :, :] + (loaded >> 4).to(tl.float32) * high[None, :, :]
            if not MINIMA:
                part -= (8.0 * added)[None, :, :]
        else:
            part = widened(loaded, FP8) * low[None, :, :]
        sums += part * scale.to(tl.float32)[:, :, None]
        if MINIMA:
            least = tl.load(minima + scale_at) if EVEN else tl.load(minima + scale_at, mask=known, other=0.0)
            sums += added[None, :, :] * least.to(tl.float32)[:, :, None]
    result = tl.sum(tl.sum(sums, axis=2), axis=1)
    if BIAS:
        result += tl.load(bias + line).to(tl.float32)
    tl.store(out + o, result, mask=o < outs)


@triton.jit
def columns_of(x, token, column, width, x_stride, EVEN: tl.constexpr):
    """Load x.T of these columns: [column, token]."""
    at = x + token[None, :] * x_stride + column[:, None]
    return tl.load(at) if EVEN else tl.load(at, mask=(column < width)[:, None], other=0.0)


@triton.jit
def of_groups(
    each, line, step, stride, BYTES: tl.constexpr, GROUP: tl.constexpr, OUTS: tl.constexpr, EVEN: tl.constexpr
):
    """Load the scale or minimum of each byte of a tile, of groups of `GROUP` bytes: [out, byte]."""
    group = step * (BYTES // GROUP) + tl.arange(0, BYTES // GROUP)
    at = each + line[:, None] * ((stride + GROUP - 1) // GROUP) + group[None, :]
    found = tl.load(at) if EVEN else tl.load(at, mask=(group * GROUP < stride)[None, :], other=0.0)
    wide = tl.broadcast_to(found.to(tl.float32)[:, :, None], [OUTS, BYTES // GROUP, GROUP])
    return tl.reshape(wide, [OUTS, BYTES])


@triton.jit(do_not_specialize=["tokens", "steps"])  # one kernel for all numbers of rows
def product(
    x, weights, scales, minima, bias, out, parts, tokens, width, outs, x_stride, steps,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    FP8: tl.constexpr, MINIMA: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of out.T over `steps` tiles of `BYTES` weight bytes a row; `GROUP` bytes share a scale, with 0
    all of a row. A byte of `FOUR`, 4-bit codes, holds columns i and i + GROUP of a group."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)  # neighbours share the weights
    o = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    token = tl.minimum(t, tokens - 1).to(tl.int64)
    line = tl.minimum(o, outs - 1).to(tl.int64)
    stride = width // 2 if FOUR else width  # bytes a row of weights
    sums = tl.zeros([OUTS, TOKENS], tl.float32)
    for step in range(split * steps, (split + 1) * steps):
        byte = step * BYTES + tl.arange(0, BYTES)
        at = weights + line[:, None] * stride + byte[None, :]
        codes = tl.load(at) if EVEN else tl.load(at, mask=(byte < stride)[None, :], other=0)
        if GROUP:
            wide = of_groups(scales, line, step, stride, BYTES, GROUP, OUTS, EVEN)
            if FOUR:
                if MINIMA:
                    least = of_groups(minima, line, step, stride, BYTES, GROUP, OUTS, EVEN)
                    low, high = (codes & 15).to(tl.float32) * wide + least, (codes >> 4).to(tl.float32) * wide + least
                else:
                    low = ((codes & 15).to(tl.float32) - 8.0) * wide
                    high = ((codes >> 4).to(tl.float32) - 8.0) * wide
                column = byte // GROUP * (2 * GROUP) + byte % GROUP
                at_high = columns_of(x, token, column + GROUP, width, x_stride, EVEN)
                sums = dot(operand(low, x.dtype.element_ty), columns_of(x, token, column, width, x_stride, EVEN), sums)
                sums = dot(operand(high, x.dtype.element_ty), at_high, sums)
            else:
                values = widened(codes, FP8) * wide
                if MINIMA:
                    values += of_groups(minima, line, step, stride, BYTES, GROUP, OUTS, EVEN)
                values = operand(values, x.dtype.element_ty)
                sums = dot(values, columns_of(x, token, byte, width, x_stride, EVEN), sums)
        else:
            values = operand(widened(codes, FP8) if FP8 else codes, x.dtype.element_ty)
            sums = dot(values, columns_of(x, token, byte, width, x_stride, EVEN), sums)
    if not GROUP:
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
