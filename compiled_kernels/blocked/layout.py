"""Convert weights to and from panels, the layout that products with few rows and with many rows both read.

A panel has 32 output columns. It is stored as rows of 32 words of 32 bits, one word per column; a word has the column's
values at adjacent positions of the width: 1 of float32, 2 of bfloat16, 4 of INT8 and FP8, 8 of 4-bit codes. A matrix in
words (see linear/planes.py) keeps its words; bytes and half bytes are put in the same order. For float16 a word is one
number of 16 bits: one instruction widens the numbers of adjacent columns.

    weight [out, width]      panel p, row k, column c, place i  =  weight[32 p + c, (values a word) k + j]

    j = i for numbers;  for bytes i is 0, 2, 1, 3 for j = 0, 1, 2, 3

A vector register then holds the words of 16 (or 8) columns at one position of the width, so a product keeps one sum per
element and needs no sum across lanes; and a panel is contiguous in memory. Panels have exactly the bytes of the plain
weight. The shape shows the layout: a plain weight has two dimensions, a weight in panels four. A stack of weights (one
per expert) has an additional first dimension in both layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

PANEL = 32  # columns
PANEL_PAIR = 2 * PANEL  # a weight has pairs of panels, which a tile of many rows reads together
BYTE_OF_COLUMN = (0, 2, 1, 3)  # byte of each of four columns in a word: adjacent columns are 16 bits apart
# Tensor elements per word; a uint8 has two 4-bit codes.
VALUES_PER_WORD = {
    torch.float32: 1, torch.float16: 1, torch.bfloat16: 2, torch.int8: 4, torch.float8_e4m3fn: 4, torch.uint8: 4,
    torch.int32: 1,
}  # fmt: skip


def panels_problem(weight: Tensor) -> str | None:
    """Return the reason why a plain weight cannot be stored in panels; None if it can."""
    if weight.dtype not in VALUES_PER_WORD:
        given = str(weight.dtype).removeprefix("torch.")
        return f"panels hold float32, bfloat16, float16, int8, float8, bytes of 4-bit codes and words, not {given}"
    if weight.ndim not in (2, 3):
        return f"panels need a matrix or a stack of matrices, not {weight.ndim} dimensions"
    out, width = weight.shape[-2:]
    if width % VALUES_PER_WORD[weight.dtype] or not out or not width:
        return f"panels need a width in multiples of {VALUES_PER_WORD[weight.dtype]}, not {out} x {width}"
    if weight.ndim == 3 and out % PANEL_PAIR:
        return f"panels of a stack need columns in multiples of {PANEL_PAIR}, not {out} x {width}"
    return None


def in_panels(weight: Tensor) -> bool:
    """Return whether `weight` is stored in panels."""
    return weight.ndim >= 4


def to_panels(weight: Tensor) -> Tensor:
    """Convert a plain weight [..., out, width] to panels [..., panel, row, 32, values per word], contiguous; pairs of
    panels are padded with zeros. Raises ValueError with the reason of `panels_problem`, if there is one.
    """
    if problem := panels_problem(weight):
        raise ValueError(problem)
    dtype, values = weight.dtype, VALUES_PER_WORD[weight.dtype]
    weight = weight.view(torch.int8) if dtype == torch.float8_e4m3fn else weight
    if missing := -weight.shape[-2] % PANEL_PAIR:
        weight = torch.cat([weight, weight.new_zeros(missing, weight.shape[-1])])
    axes = "... (panel column) (row value) -> ... panel row column value"
    return _paired(rearrange(weight, axes, column=PANEL, value=values).contiguous(), apart=True).view(dtype)


def over_rows(rows: Tensor, lay: Callable[[Tensor], Tensor]) -> Tensor:
    """Replace `rows` by `lay(rows)` in the same memory, and return the result; some pairs of panels are converted at a
    time, since a pair of panels has the bytes of its rows. No other code may read `rows` any more. Rows that do not
    form whole pairs are copied.

    Args:
        rows: a matrix, or its scales or minima: [out, word or group].
        lay: `to_panels` or `scales_to_panels`.
    """
    if rows.shape[0] % PANEL_PAIR or not rows.is_contiguous():
        return lay(rows)
    for chunk in rows.split(4 * PANEL_PAIR):  # rows and panels of a chunk fit in a core's cache
        found = lay(chunk)
        chunk.view(found.shape).copy_(found)
    return rows.view(-1, *found.shape[1:])


def from_panels(weight: Tensor) -> Tensor:
    """Return the plain weight [..., out, width] from either layout, including the zeros that pad a pair of panels."""
    if not in_panels(weight):
        return weight
    return rearrange(_paired(weight, apart=False), "... panel row column value -> ... (panel column) (row value)")


def rows_of_panels(weight: Tensor, index: Tensor) -> Tensor:
    """Return the rows `index` [token] of a weight in panels in plain form: [token, width]."""
    stored = weight.view(torch.int8) if weight.dtype == torch.float8_e4m3fn else weight
    rows = stored[index // PANEL, :, index % PANEL]  # [token, row, value]
    return _paired(rows.view(weight.dtype), apart=False).flatten(1)


def _paired(weight: Tensor, apart: bool) -> Tensor:
    """Reorder words of bytes or half bytes to the order of planes.py (`apart`: adjacent values 16 bits apart), or
    back.
    """
    if weight.dtype == torch.uint8 and weight.shape[-1] == 4:  # not single bytes: scales of experts
        words, order = weight.view(torch.int32), [8 * BYTE_OF_COLUMN[i % 4] + 4 * (i // 4) for i in range(8)]
        moves = ((at, to) if apart else (to, at) for at, to in zip(range(0, 32, 4), order, strict=True))
        fields = ((words >> at & 15) << to for at, to in moves)
        found = next(fields)
        for each in fields:
            found = found | each
        return found.view(torch.uint8)
    if weight.dtype in (torch.int8, torch.float8_e4m3fn):
        return weight.view(torch.int8)[..., BYTE_OF_COLUMN].view(weight.dtype)
    return weight


def whole_panels(vector: Tensor) -> Tensor:
    """Pad a vector with one number for each output column [out] with zeros, to whole pairs of panels."""
    missing = -len(vector) % PANEL_PAIR
    return torch.cat([vector, vector.new_zeros(missing)]) if missing else vector


def regrouped(scales: Tensor, group: int, width: int) -> Tensor:
    """Convert scales for groups of `group` columns (the last group may be shorter) to scales for smaller groups: the
    largest that divide both `group` and the width.
    """
    if width % group == 0:
        return scales
    return scales[:, torch.arange(0, width, math.gcd(group, width), device=scales.device) // group]


def scales_to_panels(scales: Tensor) -> Tensor:
    """Convert scales of groups [..., out, group] to panels [..., panel, group, 32, 1], which `from_panels` reads."""
    if missing := -scales.shape[-2] % PANEL_PAIR:
        scales = torch.cat([scales, scales.new_zeros(missing, scales.shape[-1])])
    return rearrange(scales, "... (panel column) group -> ... panel group column 1", column=PANEL).contiguous()


def shape_of(weight: Tensor) -> tuple[int, int]:
    """Return (out, width) for a weight in either layout."""
    if not in_panels(weight):
        return weight.shape[-2], weight.shape[-1]
    panels, rows, columns, values = weight.shape[-4:]
    return panels * columns, rows * values


def as_words(weight: Tensor) -> Tensor:
    """View a weight in panels as the words that compiled code reads, without a copy: [..., panel, row, 32] of int32 (or
    float16).
    """
    return (weight if weight.dtype == torch.float16 else weight.view(torch.int32))[..., 0]
