"""Kernels of products with quantized weights: one row is multiplied and summed, more rows go through the tensor
cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_kernels.linear.triton_words import columns_in, numbers_of, spread
from compiled_kernels.triton_code.dots import dot, operand


@triton.jit
def widened(codes, FP8: tl.constexpr):
    """Return 8-bit codes as float32: int8 numbers, or E4M3 bytes (not NaN). The sign, exponent and fraction of E4M3 are
    moved to their places in float16, which gives 1/256 of the value."""
    if FP8:
        halves = (codes & 127).to(tl.uint16) << 7 | (codes & 128).to(tl.uint16) << 8
        return halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return codes.to(tl.float32)


@triton.jit
def four_bits(words, line, first, width, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Load 4-bit codes of `COLUMNS` columns of these rows, from column `first`: [row, column]."""
    word = first // 8 + tl.arange(0, COLUMNS // 8)
    at = words + line[:, None] * (width // 8) + word[None, :]
    found = tl.load(at) if EVEN else tl.load(at, mask=(word < width // 8)[None, :], other=0)
    return columns_in(found, 4)


@triton.jit
def one_row(
    x, values, scales, bias, out, width, outs, OUTS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply one row by 8-bit codes with one scale for each row of weights."""
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
    """Multiply one row by codes with a scale for each group of `GROUP` columns. `FOUR`: words of 4-bit codes, stored as
    code + 8 if there are no minima; the sum is then corrected by sum((code - 8) x) = sum(code x) - sum(8 x), computed
    once for all rows of weights."""
    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    line = tl.minimum(o, outs - 1).to(tl.int64)
    sums = tl.zeros([OUTS, GROUPS, GROUP], tl.float32)
    for begin in range(0, groups, GROUPS):
        group = begin + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        scale_at = line[:, None] * groups + group[None, :]
        known = (group < groups)[None, :]
        row = tl.load(x + column) if EVEN else tl.load(x + column, mask=column < width, other=0.0)
        row = row.to(tl.float32)
        if FOUR:
            part = (
                tl.reshape(
                    four_bits(weights, line, begin * GROUP, width, GROUPS * GROUP, EVEN), [OUTS, GROUPS, GROUP]
                ).to(tl.float32)
                * row[None, :, :]
            )
            if not MINIMA:
                part -= (8.0 * row)[None, :, :]
        else:
            at = weights + line[:, None, None] * width + column[None, :, :]
            loaded = tl.load(at) if EVEN else tl.load(at, mask=(column < width)[None, :, :], other=0)
            part = widened(loaded, FP8) * row[None, :, :]
        scale = tl.load(scales + scale_at) if EVEN else tl.load(scales + scale_at, mask=known, other=0.0)
        sums += part * scale.to(tl.float32)[:, :, None]
        if MINIMA:
            least = tl.load(minima + scale_at) if EVEN else tl.load(minima + scale_at, mask=known, other=0.0)
            sums += row[None, :, :] * least.to(tl.float32)[:, :, None]
    result = tl.sum(tl.sum(sums, axis=2), axis=1)
    if BIAS:
        result += tl.load(bias + line).to(tl.float32)
    tl.store(out + o, result, mask=o < outs)


@triton.jit
def columns_of(x, token, column, width, x_stride, EVEN: tl.constexpr):
    """Load x.T [column, token] for these columns."""
    at = x + token[None, :] * x_stride + column[:, None]
    return tl.load(at) if EVEN else tl.load(at, mask=(column < width)[:, None], other=0.0)


@triton.jit
def of_groups(each, line, step, width, COLUMNS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """Load the scale or minimum of each column of a tile [out, column]; `GROUP` columns share one."""
    group = step * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    at = each + line[:, None] * ((width + GROUP - 1) // GROUP) + group[None, :]
    found = tl.load(at) if EVEN else tl.load(at, mask=(group * GROUP < width)[None, :], other=0.0)
    return spread(found.to(tl.float32), GROUP)


@triton.jit
def weights_of(
    weights, scales, minima, line, step, width, COLUMNS: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    FP8: tl.constexpr, MINIMA: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load the weights of these rows in the columns of a step [out, column], without the scale of a whole row.

    `GROUP` columns share a scale, with 0 all of a row. `FOUR`: words of 4-bit codes. `FORMAT`: words of a format of
    `WORDS`."""
    if FORMAT is not None:
        values = numbers_of(weights, scales, minima, line, step * COLUMNS, width, COLUMNS, FORMAT, EVEN)
    else:
        if FOUR:
            codes = four_bits(weights, line, step * COLUMNS, width, COLUMNS, EVEN)
            codes = codes if MINIMA else codes - 8
        else:
            column = step * COLUMNS + tl.arange(0, COLUMNS)
            at = weights + line[:, None] * width + column[None, :]
            codes = tl.load(at) if EVEN else tl.load(at, mask=(column < width)[None, :], other=0)
        if GROUP:
            values = widened(codes, FP8) * of_groups(scales, line, step, width, COLUMNS, GROUP, EVEN)
            if MINIMA:
                values += of_groups(minima, line, step, width, COLUMNS, GROUP, EVEN)
        else:
            values = widened(codes, FP8) if FP8 else codes
    return values


@triton.jit(do_not_specialize=["tokens", "steps"])  # one kernel for all numbers of rows
def product(
    x, weights, scales, minima, bias, out, parts, tokens, width, outs, x_stride, steps,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    FP8: tl.constexpr, MINIMA: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of out.T, summed over `steps` tiles of `COLUMNS` columns of the weights (see `weights_of`)."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)  # neighbours share the weights
    o = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    token = tl.minimum(t, tokens - 1).to(tl.int64)
    line = tl.minimum(o, outs - 1).to(tl.int64)
    sums = tl.zeros([OUTS, TOKENS], tl.float32)
    for step in range(split * steps, (split + 1) * steps):
        column = step * COLUMNS + tl.arange(0, COLUMNS)
        values = weights_of(
            weights, scales, minima, line, step, width, COLUMNS, GROUP, FOUR, FP8, MINIMA, FORMAT, EVEN
        )  # fmt: skip
        at_columns = columns_of(x, token, column, width, x_stride, EVEN)
        sums = dot(operand(values, x.dtype.element_ty), at_columns, sums)
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
