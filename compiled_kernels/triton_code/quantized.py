"""Load tiles of quantized keys and values as numbers: words of four bytes are loaded and unpacked in registers.

Layouts and formulas are those of `quantized_attention/quantize.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

DENSE, INT8, INT4, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
HALVES, BYTES = tl.constexpr(8), tl.constexpr(4)  # numbers of a word
FORMAT_NUMBERS = {"dense": DENSE.value, "int8": INT8.value, "int4": INT4.value, "fp8": FP8.value}


@triton.jit
def split_bytes(words, low: tl.constexpr, most: tl.constexpr):
    """Return the bits of every byte of the words [word, kept] from bit `low` on, masked by `most`; the result is [word,
    kept, 2, 2].
    """
    byte_0 = (words >> low) & most
    byte_1 = (words >> (8 + low)) & most
    byte_2 = (words >> (16 + low)) & most
    byte_3 = (words >> (24 + low)) & most
    return tl.join(tl.join(byte_0, byte_2), tl.join(byte_1, byte_3))


@triton.jit
def decode_words(words, KIND: tl.constexpr):
    """Return the codes of the words [word, kept] in order: [4 or 8 times word, kept] in float32."""
    if KIND == INT4:
        both = tl.join(split_bytes(words, 0, 15), split_bytes(words, 4, 15))
        found = tl.reshape(tl.permute(both, (0, 4, 2, 3, 1)), (words.shape[0] * 8, words.shape[1]))
    else:
        found = tl.reshape(tl.permute(split_bytes(words, 0, 255), (0, 2, 3, 1)), (words.shape[0] * 4, words.shape[1]))
    if KIND == FP8:
        found = found.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def key_tile(
    pages, scales, minima, page, group, offset, wanted, page_stride, group_stride, scale_page, scale_group, dim,
    TILE: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Return the keys [DIM, TILE] of the tokens from `offset` of a page on; tokens that are not `wanted` are zero.
    There is a scale for each channel and run of RUN tokens. Strides count words; for dense keys they count numbers."""
    token = offset + tl.arange(0, TILE)
    channel = tl.arange(0, DIM)
    inside = (channel < dim)[:, None] & wanted[None, :]
    at = page * page_stride + group * group_stride
    if KIND == DENSE:
        numbers = tl.load(pages + at + token[None, :] * dim + channel[:, None], mask=inside, other=0.0)
    else:
        PER: tl.constexpr = HALVES if KIND == INT4 else BYTES
        word = tl.arange(0, DIM // PER)
        there = (word < dim // PER)[:, None] & wanted[None, :]
        words = tl.load(pages + at + word[:, None] * SIZE + token[None, :], mask=there, other=0)
        part = page * scale_page + group * scale_group
        if RUN % TILE == 0:  # one run
            place = part + offset // RUN * dim + channel[:, None]
            known = (channel < dim)[:, None]
        else:
            place = part + token[None, :] // RUN * dim + channel[:, None]
            known = inside
        numbers = decode_words(words, KIND) * tl.load(scales + place, mask=known, other=0.0).to(tl.float32)
        if KIND != FP8:
            numbers += tl.load(minima + place, mask=known, other=0.0).to(tl.float32)
        numbers = tl.where(inside, numbers, 0.0)  # scales of an unwritten run may hold any bits
    return numbers


@triton.jit
def value_tile(
    pages, scales, minima, page, group, offset, wanted, page_stride, group_stride, scale_page, scale_group, dim,
    TILE: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the values [TILE, DIM], as `key_tile` returns keys. There is a scale for each token and run of COLUMNS
    columns.
    """
    token = offset + tl.arange(0, TILE)
    column = tl.arange(0, DIM)
    inside = wanted[:, None] & (column < dim)[None, :]
    at = page * page_stride + group * group_stride
    if KIND == DENSE:
        numbers = tl.load(pages + at + token[:, None] * dim + column[None, :], mask=inside, other=0.0)
    else:
        PER: tl.constexpr = HALVES if KIND == INT4 else BYTES
        word = offset // PER + tl.arange(0, TILE // PER)
        there = (word * PER < SIZE)[:, None] & (column < dim)[None, :]
        words = tl.load(pages + at + word[:, None] * dim + column[None, :], mask=there, other=0)
        part = page * scale_page + group * scale_group
        if COLUMNS >= DIM:  # one run
            place = part + token[:, None]
            known = wanted[:, None]
        else:
            place = part + column[None, :] // COLUMNS * SIZE + token[:, None]
            known = inside
        numbers = decode_words(words, KIND) * tl.load(scales + place, mask=known, other=0.0).to(tl.float32)
        if KIND != FP8:
            numbers += tl.load(minima + place, mask=known, other=0.0).to(tl.float32)
        numbers = tl.where(inside, numbers, 0.0)
    return numbers
