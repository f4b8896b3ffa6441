from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels.cases import Case, CaseCost, Suite, in_float64, random_normal
from compiled_kernels.expert_linear.stacks import stack_format, stack_from_panels, stack_to_panels
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, WORDS, MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix, quantize_matrix


def inputs(
    generator: torch.Generator, rows: int, experts: int, width: int, out: int, bias: bool, dtype: torch.dtype,
    panels: bool = False, named: int | None = None, format: MatrixFormat = DENSE_MATRIX,
) -> tuple:  # fmt: skip
    """Draw inputs. The rows use the first `named` experts (default: all); the weights of experts without rows are
    NaN.
    """
    expert = torch.randint(named or experts, (rows,), generator=generator)
    shift = random_normal(generator, dtype, (experts, out))
    stack = random_stack(generator, format, (experts, out, width), dtype)
    unnamed = torch.ones(experts, dtype=torch.bool)
    unnamed[expert] = False
    shift[unnamed] = torch.nan
    spoil(stack, unnamed)
    weight, scales, minima = stack_to_panels(*stack) if panels else stack
    x = random_normal(generator, dtype, (rows, width))
    return x, expert, weight, shift if bias else None, scales, minima, format.codes


def random_stack(
    generator: torch.Generator, format: MatrixFormat, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Draw random matrices of all experts [expert, out, width], with numbers near 1: the weight (of `dtype` if it is
    dense), its scales and its minima.
    """
    dense = random_normal(generator, dtype, shape)
    if format.is_dense:
        return dense, None, None
    parts = [part.unflatten(0, shape[:2]) for part in quantize_matrix(dense.flatten(0, 1), format)]
    return parts[0], parts[1], parts[2] if len(parts) > 2 else None


def spoil(stack: tuple[Tensor, Tensor | None, Tensor | None], experts: Tensor | list[int]) -> None:
    """Set the weights of some experts to NaN, or to the largest value if scales are exponents."""
    weight, scales, _ = stack
    spoilt = weight if scales is None else scales
    spoilt[experts] = torch.nan if spoilt.is_floating_point() else 255


def plain(width: int, weight: Tensor, scales: Tensor | None, minima: Tensor | None, codes: str) -> Tensor:
    """Return the matrices of all experts, row by row, in float64."""
    format = stack_format(codes, width, scales, minima)
    parts = stack_from_panels(weight, scales, minima)
    weight, *beside = (each for each in parts if each is not None)
    if not beside:
        return weight.double()
    beside = [each.double() if each.is_floating_point() else each for each in beside]
    matrix = dequantize_matrix(format, *(each.flatten(0, 1) for each in (weight, *beside)))
    return matrix.double().unflatten(0, weight.shape[:2])


def terms(width: int, **_: object) -> float:
    return 4 + math.sqrt(width)


def scale(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None, *rest: Any
) -> Tensor:
    """Return the typical size of a sum of products with random signs: the root of the sum of squares, and for a row its
    maximum."""
    shift, matrices = None if bias is None else bias.double().square(), plain(x.shape[1], weight, scales, *rest)
    squares = compiled_kernels.expert_linear(x.double().square(), expert, matrices.square(), shift)
    return squares.sqrt().amax(-1, keepdim=True)


def exact(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, *stored: Any) -> Tensor:
    return compiled_kernels.expert_linear(*in_float64((x, expert, plain(x.shape[1], weight, *stored), bias)))


# (rows, experts, width, out, whether in panels, experts named): decode and prefill of OLMoE's kind, ragged ones, one
# expert that takes all, more experts than rows.
SHAPES: list[tuple[int, int, int, int, bool, int | None]] = [
    (4, 32, 576, 1536, False, None), (64, 32, 576, 1536, False, None), (5, 3, 16, 7, False, None),
    (1, 4, 33, 5, False, None), (9, 4, 48, 40, False, 1), (8, 16, 576, 1536, True, None),
    (256, 16, 576, 1536, True, None), (5, 3, 64, 64, True, None), (40, 4, 352, 192, True, 1),
    (64, 3, 96, 128, True, None),
]  # fmt: skip
INT4, MXFP4 = MatrixFormat("int4", 32, torch.float16), MatrixFormat.named("mxfp4")
# Matrices in few bits: (rows, experts, width, out, whether in panels, format).
CODES: list[tuple[int, int, int, int, bool, MatrixFormat]] = [
    (4, 32, 576, 1536, False, INT4), (8, 16, 576, 1536, True, INT4), (256, 16, 576, 1536, True, INT4),
    (8, 16, 576, 1536, True, MXFP4), (256, 16, 576, 1536, True, MXFP4), (5, 3, 64, 7, False, MXFP4),
    (8, 16, 576, 1536, True, INT8_MATRIX), (5, 3, 33, 7, False, INT8_MATRIX),
    (8, 3, 96, 64, True, MatrixFormat("int8", 32, torch.float16)), (5, 3, 48, 7, False, replace(INT4, group=8)),
    (5, 3, 64, 64, True, replace(INT4, minima=torch.float32)), (5, 3, 48, 7, False, MatrixFormat("fp8")),
    (7, 4, 48, 40, False, MatrixFormat("int8", 16, torch.bfloat16)),
    (5, 3, 64, 64, True, MatrixFormat("fp8", 32, torch.float32)),
    *((rows, 3, 256, 64, rows > 4, MatrixFormat.named(name)) for name in WORDS for rows in (4, 9)),
]  # fmt: skip


def case(
    rows: int, experts: int, width: int, out: int, panels: bool, named: int | None, format: MatrixFormat,
    dtype: torch.dtype,
) -> Case:  # fmt: skip
    stored = width * out * dtype.itemsize if format.is_dense else format.nbytes(out, width)
    read, code = min(rows, named or experts), "" if format.is_dense else f" {format}"
    name = f"{rows} of {named or experts} {width}x{out}{code}" + " panels" * panels + " one takes all" * (named == 1)
    arguments = {"rows": rows, "experts": experts, "width": width, "out": out, "bias": True, "dtype": dtype}
    arguments |= {"panels": panels, "named": named, "format": format}
    return Case(name, arguments, CaseCost(read * stored, 2 * rows * width * out), timed=width > 500)


DTYPES = torch.float32, torch.bfloat16
CASES = [case(*sizes, DENSE_MATRIX, dtype) for sizes in SHAPES for dtype in DTYPES]
CASES += [
    case(rows, experts, width, out, panels, None, format, dtype)
    for rows, experts, width, out, panels, format in CODES
    for dtype in DTYPES
]
SUITES = (
    Suite("expert_linear", inputs, compiled_kernels.expert_linear, tuple(CASES), terms, exact=exact, scale=scale),
)
