"""Convert stacks between the two layouts of a weight, rows and panels (see blocked/layout.py). A stack holds the
matrices of all experts in one tensor [expert, out, width], with their scales and minima if they are quantized (see
linear/matrix_format.py).

In panels, the scales and minima of groups of columns are [expert, panel, group, 32, 1].
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
    """Return the storage format of a stack of matrices with `width` columns, from the name of their codes (see
    `MatrixFormat`), their scales and their minima. Raises ValueError if the scales do not divide the columns into equal
    groups.
    """
    groups = 0
    if scales is not None and codes not in WORDS:
        groups = scales.shape[-3] if in_panels(scales) else scales.shape[-1] if scales.ndim > 2 else 0
    if groups and width % groups:
        raise ValueError(
            f"{groups} scales per row do not divide {width} columns into equal groups; use a divisor of {width}"
        )
    return MatrixFormat.of(codes, groups and width // groups, scales, minima)


def stack_panels_problem(format: MatrixFormat, weight: Tensor) -> str | None:
    """Return why a stack cannot be stored in panels; None if it can."""
    per_word = VALUES_PER_WORD.get(weight.dtype, 1)
    if format.group % per_word:
        return f"panels need groups in multiples of {per_word} columns, not of {format.group}"
    return panels_problem(weight)


def stack_to_panels(weight: Tensor, scales: Tensor | None, minima: Tensor | None) -> Stack:
    """Convert a stack from rows to panels, with its scales and minima; scales of whole rows stay unchanged."""
    scales, minima = (each if each is None or each.ndim < 3 else scales_to_panels(each) for each in (scales, minima))
    return to_panels(weight), scales, minima


def stack_from_panels(weight: Tensor, scales: Tensor | None, minima: Tensor | None) -> Stack:
    """Convert a stack, or the tensors of one expert, from panels to rows."""
    scales, minima = (None if each is None else from_panels(each) for each in (scales, minima))
    return from_panels(weight), scales, minima


def of_expert(stack: Stack, index: Tensor | int) -> Stack:
    """Return the tensors of one or several experts of a stack, in the layout of rows."""
    scales, minima = (None if each is None else each[index] for each in stack[1:])
    return stack_from_panels(stack[0][index], scales, minima)
