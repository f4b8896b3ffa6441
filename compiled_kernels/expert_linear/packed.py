"""Stacks of experts' matrices in few bits. The types of codes and scales say what they are:

    codes                            scales                           a value is
    int8 [expert, out, width]        float32 [expert, out]            code * scale: INT8, a scale a row
    int8 [expert, out, width]        float16 [expert, out, group]     code * scale: INT8, a scale a group of columns
    uint8 [expert, out, width / 2]   float16 [expert, out, group]     (code - 8) * scale: INT4
    uint8 [expert, out, width / 2]   uint8 [expert, out, width / 32]  E2M1 of the code * 2^(scale - 127): MXFP4

A byte of 4-bit codes holds two neighbouring columns, the lower nibble first: the order of gpt-oss's files and of the
OCP's. Groups are runs of columns of one length. In panels (see blocked/layout.py) a word holds 4 or 8 codes, and scales
of groups are [expert, panel, group, 32, 1].

OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from compiled_kernels.blocked.layout import (
    from_panels,
    in_panels,
    panels_problem,
    scales_to_panels,
    shape_of,
    to_panels,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_GROUP = 32  # columns that share an exponent


def stack_kind(weight: Tensor, scales: Tensor | None) -> str:
    """Return what a stack holds: `dense`, `int8`, `int4` or `mxfp4`."""
    if scales is None:
        return "dense"
    if weight.dtype == torch.int8:
        return "int8"
    return "mxfp4" if scales.dtype == torch.uint8 else "int4"


def stack_group(weight: Tensor, scales: Tensor | None) -> int:
    """Return how many columns share a scale; 0 where there are none, or one a row."""
    if scales is None or scales.dtype == torch.float32:
        return 0
    groups = scales.shape[-3] if in_panels(scales) else scales.shape[-1]
    return stack_width(weight) // groups


def stack_width(weight: Tensor) -> int:
    """Return the columns of a stack in either layout."""
    return shape_of(weight)[1] * (2 if weight.dtype == torch.uint8 else 1)


def stack_panels_problem(weight: Tensor, scales: Tensor | None) -> str | None:
    """Return why a stack cannot be laid out in panels; None where it can."""
    per_word = 8 if weight.dtype == torch.uint8 else 4
    if (group := stack_group(weight, scales)) % per_word:
        return f"panels want groups in multiples of {per_word} columns, not of {group}"
    return panels_problem(weight)


def stack_to_panels(weight: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Lay a stack and its scales out in panels; scales of whole rows stay as they are."""
    grouped = scales is not None and stack_group(weight, scales)
    return to_panels(weight), scales_to_panels(scales) if grouped and scales is not None else scales


def stack_from_panels(weight: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Lay a stack and its scales out row by row."""
    return from_panels(weight), None if scales is None else from_panels(scales)


def pack_pairs(codes: UInt8[Tensor, "... width"]) -> UInt8[Tensor, "... half"]:
    """Pack codes 0..15, two neighbours a byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_pairs(packed: UInt8[Tensor, "... half"]) -> UInt8[Tensor, "... width"]:
    """Return the codes that `pack_pairs` packed."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def dequantize_stack(
    weight: Int[Tensor, "... out stored"], scales: Float[Tensor, "..."] | UInt8[Tensor, "..."]
) -> Float[Tensor, "... out width"]:
    """Return codes [..., out, width or half of it], row by row, as the numbers that they stand for, in float32.

    A code times a scale of float16 or a power of two is exact; it is rounded once where scales are float32.
    """
    kind = stack_kind(weight, scales)
    values = weight.float() if kind == "int8" else F.embedding(weight.int(), _pairs_of(kind)).flatten(-2)
    if scales.ndim < weight.ndim:
        return values * scales[..., None]
    wide = exponents(scales) if kind == "mxfp4" else scales.float()
    return (values.unflatten(-1, (wide.shape[-1], -1)) * wide[..., None]).flatten(-2)


def expert_matrix(weight: Tensor, scales: Tensor | None, number: int) -> Tensor:
    """Return one expert's plain matrix [out, width]: in the type of the stack, or float32 where that holds codes."""
    plain = from_panels(weight[number])
    return plain if scales is None else dequantize_stack(plain, from_panels(scales[number]))


def exponents(stored: UInt8[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return 2^(stored - 127) in float32; 255 is NaN. (e8m0: a graph has no type for it.)"""
    wide = stored.int()
    special = (wide == 0) | (wide == 255)  # subnormal, and not a number
    return (wide << 23 | special.int() << 22).view(torch.float32)


def _pairs_of(kind: str) -> Tensor:
    """Return the two values of each byte: [256, 2]."""
    values = torch.tensor(E2M1) if kind == "mxfp4" else torch.arange(-8.0, 8.0)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], -1)


def e2m1_values(codes: Int[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Return E2M1's values of codes 0..15 by arithmetic, which a graph turns into vector code."""
    size = (codes & 7).to(dtype)  # 0, 1, 2, 3, 4, 6, 8, 12 halves
    halves = size + (size - 4).clamp_min(0) + 2 * (size - 6).clamp_min(0)
    return halves * (0.5 - (codes >> 3).to(dtype))
