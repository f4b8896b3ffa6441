"""Load tiles of matrices in words on a GPU, by the table of their format (see matrix_format.WORDS).

The table is a constant of the kernel: each format is compiled separately and has no branches.
"""

# A constant of a kernel is a table with fields here, which no type checker sees in `tl.constexpr`.
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns_in(words, BITS: tl.constexpr):
    """Return the codes of a plane of `BITS` bits (see linear/planes.py), one for each column [row, column], from its
    words [row, word].
    """
    found = words
    if BITS <= 4:
        found = tl.join(found, found >> 4)
    if BITS <= 2:
        found = tl.join(found, found >> 2)
    if BITS == 1:
        found = tl.join(found, found >> 1)
    found = tl.join(found, found >> 8)
    found = tl.join(found, found >> 16)
    return tl.reshape(found & ((1 << BITS) - 1), [words.shape[0], words.shape[1] * (32 // BITS)])


@triton.jit
def spread(each, GROUP: tl.constexpr):
    """Repeat each group's value for its columns: [row, group] -> [row, column]."""
    wide = tl.broadcast_to(each[:, :, None], [each.shape[0], each.shape[1], GROUP])
    return tl.reshape(wide, [each.shape[0], each.shape[1] * GROUP])


@triton.jit
def numbers_of(
    weights, scales, minima, line, first, width, COLUMNS: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr
):
    """Return the numbers of these rows in `COLUMNS` columns, at least 32, from column `first` on, in float32; columns
    past `width` are zero.
    """
    rows = weights + line[:, None] * (width // FORMAT.block * FORMAT.words)
    codes = _plane(rows, first, width, 0, FORMAT.planes[0], COLUMNS, FORMAT, EVEN)
    if len(FORMAT.planes) > 1:
        above = _plane(rows, first, width, FORMAT.planes[0], FORMAT.planes[1], COLUMNS, FORMAT, EVEN)
        codes |= above << FORMAT.planes[0]
    if len(FORMAT.values) > 0:
        table = tl.where(codes < 8, _table(FORMAT.values, 0), _table(FORMAT.values, 8))
        numbers = (table >> ((codes & 7) * 8)).to(tl.int8)
    else:
        numbers = (codes ^ FORMAT.sign_bit) - FORMAT.offset
    column = first + tl.arange(0, COLUMNS // FORMAT.group) * FORMAT.group
    place = line[:, None] * (width // FORMAT.scale_columns) + (column // FORMAT.scale_columns)[None, :]
    known = (column < width)[None, :]
    stored = tl.load(scales + place) if EVEN else tl.load(scales + place, mask=known, other=0)
    if FORMAT.exponents:
        wide = stored.to(tl.int32)
        scale = tl.where(wide < 2, (wide + 1) << 21, (wide - 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    if FORMAT.sub_scales is not None:
        factor = _integers(rows, column, known, FORMAT.sub_scales.scale, FORMAT, EVEN)
        scale *= ((factor ^ FORMAT.sub_scales.sign_bit) - FORMAT.sub_scales.offset).to(tl.float32)
    result = numbers.to(tl.float32) * spread(scale, FORMAT.group)
    if FORMAT.minima:
        least = (tl.load(minima + place) if EVEN else tl.load(minima + place, mask=known, other=0.0)).to(tl.float32)
        if FORMAT.sub_scales is not None:
            least *= -_integers(rows, column, known, FORMAT.sub_scales.minimum, FORMAT, EVEN).to(tl.float32)
        result += spread(least, FORMAT.group)
    return result


@triton.jit
def _plane(
    rows, first, width, BELOW: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Load the plane with bits `BELOW` to `BELOW` + `BITS` of each code: [row, column]."""
    column = first + tl.arange(0, COLUMNS * BITS // 32) * (32 // BITS)
    within = (BELOW * FORMAT.block + column % FORMAT.block * BITS) // 32
    at = rows + (column // FORMAT.block * FORMAT.words + within)[None, :]
    return columns_in(tl.load(at) if EVEN else tl.load(at, mask=(column < width)[None, :], other=0), BITS)


@triton.jit
def _integers(rows, column, known, FIELDS: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """Load the integers that `FIELDS` of the sub-scales make up, of the groups that begin at these columns."""
    first = column // FORMAT.block * FORMAT.words + FORMAT.plane_words
    for i in tl.static_range(len(FIELDS)):  # type: ignore[misc] (unrolled by Triton)
        bit = column % FORMAT.block // FORMAT.group * FIELDS[i][0] + FIELDS[i][1]
        at = rows + (first + bit // 32)[None, :]
        word = tl.load(at) if EVEN else tl.load(at, mask=known, other=0)
        field = (word >> (bit % 32)[None, :]) & ((1 << FIELDS[i][0]) - 1)
        if i == 0:
            found = field
        else:
            found |= field << FIELDS[0][0]
    return found


@triton.constexpr_function
def _table(values, first):
    """Return eight values as the bytes of an integer."""
    return int.from_bytes([value & 255 for value in values[first : first + 8]], "little", signed=True)


@triton.jit
def one_row_words(
    x, weights, scales, minima, bias, out, width, outs, OUTS: tl.constexpr, COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply one row by a matrix in words."""
    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    line = tl.minimum(o, outs - 1).to(tl.int64)  # past the end the last one is read again, and not stored
    sums = tl.zeros([OUTS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        row = tl.load(x + column) if EVEN else tl.load(x + column, mask=column < width, other=0.0)
        numbers = numbers_of(weights, scales, minima, line, first, width, COLUMNS, FORMAT, EVEN)
        sums += numbers * row.to(tl.float32)[None, :]
    result = tl.sum(sums, axis=1)
    if BIAS:
        result += tl.load(bias + line).to(tl.float32)
    tl.store(out + o, result, mask=o < outs)
