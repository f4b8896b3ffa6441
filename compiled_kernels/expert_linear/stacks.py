"""Stacks of experts' matrices: the tensors of a matrix (see linear/matrix_format.py), the expert as their first axis.

In panels (see blocked/layout.py) scales and minima of groups are [expert, panel, group, 32, 1].
"""

from __future__ import annotations

from torch import Tensor

from compiled_kernels.blocked.layout import (
    VALUES_PER_WORD,
    from_panels,
    in_panels,
    panels_problem,
    scales_to_panels,
    to_panels,
)
from compiled_kernels.linear.matrix_format import WORDS, MatrixFormat

Stack = tuple[Tensor, Tensor | None, Tensor | None]  # matrices, scales, minima


def stack_format(codes: str, width: int, scales: Tensor | None, minima: Tensor | None) -> MatrixFormat:
    """Return how matrices of so many columns are stored whose codes are `codes` (see `MatrixFormat`), with these scales
    and minima. Raises ValueError for a number of scales that makes no whole groups."""
    groups = 0
    if scales is not None and codes not in WORDS:
        groups = scales.shape[-3] if in_panels(scales) else scales.shape[-1] if scales.ndim > 2 else 0
    if groups and width % groups:
        raise ValueError(
            f"{groups} scales a row make no whole groups of {width} columns; a divisor of {width} is wanted"
        )
    return MatrixFormat.of(codes, groups and width // groups, scales, minima)


def stack_panels_problem(format: MatrixFormat, weight: Tensor) -> str | None:
    """Return why a stack cannot be laid out in panels; None where it can."""
    per_word = VALUES_PER_WORD.get(weight.dtype, 1)
    if format.group % per_word:
        return f"panels want groups in multiples of {per_word} columns, not of {format.group}"
    return panels_problem(weight)


def stack_to_panels(weight: Tensor, scales: Tensor | None, minima: Tensor | None) -> Stack:
    """Lay a stack, its scales and minima out in panels; scales of whole rows stay as they are."""
    scales, minima = (each if each is None or each.ndim < 3 else scales_to_panels(each) for each in (scales, minima))
    return to_panels(weight), scales, minima


def stack_from_panels(weight: Tensor, scales: Tensor | None, minima: Tensor | None) -> Stack:
    """Lay a stack, or the tensors of one expert, out row by row."""
    scales, minima = (None if each is None else from_panels(each) for each in (scales, minima))
    return from_panels(weight), scales, minima


def of_expert(stack: Stack, index: Tensor | int) -> Stack:
    """Return the tensors of one expert, or of some, row by row."""
    scales, minima = (None if each is None else each[index] for each in stack[1:])
    return stack_from_panels(stack[0][index], scales, minima)
