"""A weight laid out in panels: one layout that products of few rows and of many read.

A panel is 32 output columns. It is stored as rows of 32 words of 32 bits, one word a column; a word holds what that
column has at consecutive positions along the width: 1 of float32, 2 of bfloat16, 4 of INT8, 8 of INT4. A matrix in
words (see linear/planes.py) keeps them.

    weight [out, width]      panel p, row k, column c, place i  =  weight[32 p + c, (values a word) k + i]

A vector register then holds one step along the width for 16 (or 8) columns, so that a product keeps one sum an element
and no sum goes across lanes; and a panel is one run of memory from its first byte to its last. It takes exactly the
bytes of the plain weight. The layout is seen from the shape: a plain weight has two dimensions, one in panels has
four. A stack of weights (one an expert) has one dimension more, the first, in either layout.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

PANEL = 32  # columns
PANEL_PAIR = 2 * PANEL  # a weight's columns come in pairs of panels, which a tile of many rows reads side by side
# Elements of a tensor in a word; a byte of uint8 is two codes of 4 bits.
VALUES_PER_WORD = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4, torch.uint8: 4, torch.int32: 1}


def panels_problem(weight: Tensor) -> str | None:
    """Return why a plain weight cannot be laid out in panels; None where it can."""
    if weight.dtype not in VALUES_PER_WORD:
        given = str(weight.dtype).removeprefix("torch.")
        return f"panels hold float32, bfloat16, int8, bytes of 4-bit codes and words, not {given}"
    if weight.ndim not in (2, 3):
        return f"panels are made of a matrix or a stack of such, not of {weight.ndim} dimensions"
    out, width = weight.shape[-2:]
    unit = 1 if weight.dtype == torch.int32 else 2 * VALUES_PER_WORD[weight.dtype]
    if out % PANEL_PAIR or width % unit or not out or not width:
        wanted = f"columns in multiples of {PANEL_PAIR} and a width in multiples of {unit}"
        return f"panels want {wanted}, not {out} x {width}"
    return None


def in_panels(weight: Tensor) -> bool:
    """Return whether `weight` is laid out in panels."""
    return weight.ndim >= 4


def to_panels(weight: Tensor) -> Tensor:
    """Lay a weight [..., out, width] out as [..., panel, row, 32, values a word], contiguous. Raises ValueError where
    `panels_problem` has a reason."""
    if problem := panels_problem(weight):
        raise ValueError(problem)
    return rearrange(
        weight,
        "... (panel column) (row value) -> ... panel row column value",
        column=PANEL,
        value=VALUES_PER_WORD[weight.dtype],
    ).contiguous()


def from_panels(weight: Tensor) -> Tensor:
    """Return the plain weight [..., out, width] of either layout."""
    if not in_panels(weight):
        return weight
    return rearrange(weight, "... panel row column value -> ... (panel column) (row value)")


def scales_to_panels(scales: Tensor) -> Tensor:
    """Lay scales of groups [..., out, group] out as [..., panel, group, 32, 1], which `from_panels` reads."""
    return rearrange(scales, "... (panel column) group -> ... panel group column 1", column=PANEL).contiguous()


def shape_of(weight: Tensor) -> tuple[int, int]:
    """Return (out, width) of a weight in either layout."""
    if not in_panels(weight):
        return weight.shape[-2], weight.shape[-1]
    panels, rows, columns, values = weight.shape[-4:]
    return panels * columns, rows * values


def as_words(weight: Tensor) -> Tensor:
    """View a weight in panels as the words that compiled code reads: [..., panel, row, 32] of int32, in place."""
    return weight.view(torch.int32)[..., 0]
