"""A weight laid out in panels: one layout that products of few rows and of many read.

A panel is 32 output columns. It is stored as rows of 32 words of 32 bits, one word a column; a word holds what that
column has at neighbouring positions of the width: 1 of float32, 2 of bfloat16, 4 of INT8 and FP8, 8 of 4-bit codes. A
matrix in words (see linear/planes.py) keeps them, and bytes and half bytes are put in their order. Words of float16 are
its numbers, of 16 bits: one instruction widens those of neighbouring columns.

    weight [out, width]      panel p, row k, column c, place i  =  weight[32 p + c, (values a word) k + j]

    j = i of numbers;  of bytes i is at 0, 2, 1, 3 for j = 0, 1, 2, 3

A vector register then holds one step along the width for 16 (or 8) columns, so that a product keeps one sum an element
and no sum goes across lanes; and a panel is one run of memory from its first byte to its last. It takes exactly the
bytes of the plain weight. The layout is seen from the shape: a plain weight has two dimensions, one in panels has
four. A stack of weights (one an expert) has one dimension more, the first, in either layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

PANEL = 32  # columns
PANEL_PAIR = 2 * PANEL  # a weight's columns come in pairs of panels, which a tile of many rows reads side by side
BYTE_OF_COLUMN = (0, 2, 1, 3)  # of four columns in a word: pairs of neighbours stand 16 bits apart
# Elements of a tensor in a word; a byte of uint8 is two codes of 4 bits.
VALUES_PER_WORD = {
    torch.float32: 1, torch.float16: 1, torch.bfloat16: 2, torch.int8: 4, torch.float8_e4m3fn: 4, torch.uint8: 4,
    torch.int32: 1,
}  # fmt: skip


def panels_problem(weight: Tensor) -> str | None:
    """Return why a plain weight cannot be laid out in panels; None where it can."""
    if weight.dtype not in VALUES_PER_WORD:
        given = str(weight.dtype).removeprefix("torch.")
        return f"panels hold float32, bfloat16, float16, int8, float8, bytes of 4-bit codes and words, not {given}"
    if weight.ndim not in (2, 3):
        return f"panels are made of a matrix or a stack of such, not of {weight.ndim} dimensions"
    out, width = weight.shape[-2:]
    if width % VALUES_PER_WORD[weight.dtype] or not out or not width:
        return f"panels want a width in multiples of {VALUES_PER_WORD[weight.dtype]}, not {out} x {width}"
    if weight.ndim == 3 and out % PANEL_PAIR:
        return f"panels of a stack want columns in multiples of {PANEL_PAIR}, not {out} x {width}"
    return None


def in_panels(weight: Tensor) -> bool:
    """Return whether `weight` is laid out in panels."""
    return weight.ndim >= 4


def to_panels(weight: Tensor) -> Tensor:
    """Lay a weight [..., out, width] out as [..., panel, row, 32, values a word], contiguous; a pair of panels is
    filled up with zeros. Raises ValueError where `panels_problem` has a reason."""
    if problem := panels_problem(weight):
        raise ValueError(problem)
    dtype, values = weight.dtype, VALUES_PER_WORD[weight.dtype]
    weight = weight.view(torch.int8) if dtype == torch.float8_e4m3fn else weight
    if missing := -weight.shape[-2] % PANEL_PAIR:
        weight = torch.cat([weight, weight.new_zeros(missing, weight.shape[-1])])
    axes = "... (panel column) (row value) -> ... panel row column value"
    return _paired(rearrange(weight, axes, column=PANEL, value=values).contiguous(), apart=True).view(dtype)


def over_rows(rows: Tensor, lay: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `lay(rows)`, some pairs of panels at a time over the rows themselves, which no one else may read: a pair
    takes the bytes of its rows. Rows that are no whole pairs are copied.

    Args:
        rows: a matrix, or what stands beside one: [out, word or group].
        lay: `to_panels` or `scales_to_panels`.
    """
    if rows.shape[0] % PANEL_PAIR or not rows.is_contiguous():
        return lay(rows)
    for chunk in rows.split(4 * PANEL_PAIR):  # they and their panels stay in a core's cache
        found = lay(chunk)
        chunk.view(found.shape).copy_(found)
    return rows.view(-1, *found.shape[1:])


def from_panels(weight: Tensor) -> Tensor:
    """Return the plain weight [..., out, width] of either layout, the zeros that fill a pair of panels among it."""
    if not in_panels(weight):
        return weight
    return rearrange(_paired(weight, apart=False), "... panel row column value -> ... (panel column) (row value)")


def rows_of_panels(weight: Tensor, index: Tensor) -> Tensor:
    """Return rows [token] of a weight in panels as a plain weight has them: [token, width]."""
    stored = weight.view(torch.int8) if weight.dtype == torch.float8_e4m3fn else weight
    rows = stored[index // PANEL, :, index % PANEL]  # [token, row, value]
    return _paired(rows.view(weight.dtype), apart=False).flatten(1)


def _paired(weight: Tensor, apart: bool) -> Tensor:
    """Return words of bytes or half bytes as planes.py has them: neighbours `apart` by 16 bits; or back again."""
    if weight.dtype == torch.uint8 and weight.shape[-1] == 4:  # scales of experts are bytes too, alone
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
    """Return numbers of a weight's columns [out], filled up with zeros to those of whole pairs of panels."""
    missing = -len(vector) % PANEL_PAIR
    return torch.cat([vector, vector.new_zeros(missing)]) if missing else vector


def regrouped(scales: Tensor, group: int, width: int) -> Tensor:
    """Return scales of groups of `group` columns, of the last of which fewer may be left, as those of the largest
    groups that divide the width too."""
    if width % group == 0:
        return scales
    return scales[:, torch.arange(0, width, math.gcd(group, width), device=scales.device) // group]


def scales_to_panels(scales: Tensor) -> Tensor:
    """Lay scales of groups [..., out, group] out as [..., panel, group, 32, 1], which `from_panels` reads."""
    if missing := -scales.shape[-2] % PANEL_PAIR:
        scales = torch.cat([scales, scales.new_zeros(missing, scales.shape[-1])])
    return rearrange(scales, "... (panel column) group -> ... panel group column 1", column=PANEL).contiguous()


def shape_of(weight: Tensor) -> tuple[int, int]:
    """Return (out, width) of a weight in either layout."""
    if not in_panels(weight):
        return weight.shape[-2], weight.shape[-1]
    panels, rows, columns, values = weight.shape[-4:]
    return panels * columns, rows * values


def as_words(weight: Tensor) -> Tensor:
    """View a weight in panels as the words that compiled code reads: [..., panel, row, 32] of int32 (or float16), in
    place."""
    return (weight if weight.dtype == torch.float16 else weight.view(torch.int32))[..., 0]
