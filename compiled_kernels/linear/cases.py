"""Define the cases of products: a dense matrix, and a matrix in each format with float and INT8 activations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels.blocked.layout import from_panels, scales_to_panels, to_panels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal
from compiled_kernels.linear.api import linear_reference
from compiled_kernels.linear.int8_activations import rounded_to_int8
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, WORDS, MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix, quantize_matrix

# (rows, width, out): one row and 16 through the matrices of SmolLM2 and TinyLlama; many rows; ragged ones.
DECODE = [(1, 576, 3072), (1, 2048, 11264), (1, 5632, 2048), (16, 576, 3072), (16, 2048, 2048)]
PREFILL = [(512, 576, 3072)]
PANELS = [(1, 576, 3072), (16, 576, 3072), (512, 576, 3072), (4, 96, 128), (6, 352, 64), (7, 64, 64), (385, 704, 192)]
IN_WORDS = [(1, 256, 40), (2, 256, 40), (3, 512, 7), (5, 768, 33), (33, 256, 17), (1, 2048, 11264), (16, 2048, 2048)]
SMALL = [(1, 64, 40), (2, 64, 40), (3, 128, 7), (5, 192, 33), (33, 64, 17)]
ODD_WIDTHS = [(5, 33, 12), (33, 72, 17)]  # in bytes, for each kind of word
# Shapes with INT8 activations and a matrix in groups.
IN_GROUPS = [(1, 256, 40), (3, 512, 7), (33, 256, 17)]
INT4 = MatrixFormat("int4", 64, torch.float16)
Q4_1 = MatrixFormat("int4", 32, torch.float16, torch.float16)
# Formats in few bits other than INT8 by row, and where they are used: our INT4, Q4_0; AWQ and GPTQ; Q4_1; Q8_0; GPTQ in
# 8 bits; FP8 by block, and by row.
GROUPED = (
    INT4, MatrixFormat("int4", 32, torch.float16), MatrixFormat("int4", 64, torch.float16, torch.float32), Q4_1,
    MatrixFormat("int8", 32, torch.float16), MatrixFormat("int8", 64, torch.bfloat16, torch.float32),
    MatrixFormat("fp8", 128), MatrixFormat("fp8"),
)  # fmt: skip
NAMED = tuple(MatrixFormat.named(name) for name in WORDS)


def inputs(
    generator: torch.Generator, tokens: int, width: int, out: int, dtype: torch.dtype, bias: bool, panels: bool = False,
    format: MatrixFormat = DENSE_MATRIX, weight_dtype: torch.dtype | None = None, activations: str = "float",
) -> tuple:  # fmt: skip
    """Draw inputs. Rows that are rounded to INT8 differ much in size, as activations do; the second row is zero."""
    x = random_normal(generator, dtype, (tokens, width))
    if activations == "int8":
        x = (x * 10 ** torch.empty(tokens, 1).uniform_(-3, 3, generator=generator)).to(dtype)
        x[1:2] = 0
    weight = random_normal(generator, weight_dtype or dtype, (out, width)) * width**-0.5
    added = random_normal(generator, dtype, (out,)) if bias else None
    if format.is_dense:
        return x, to_panels(weight) if panels else weight, added
    if format.group:  # zeros in the middle would hide minima
        weight = weight + random_normal(generator, dtype, (out, 1)) * width**-0.5
    weight, *beside = quantize_matrix(weight, format)
    if panels:
        weight, beside = to_panels(weight), [each if each.ndim == 1 else scales_to_panels(each) for each in beside]
    scales, minima = (*beside, None)[:2]
    return x, weight, scales, minima, added, format.codes, format.group, activations


def cases(shapes: Iterable[tuple[int, int, int]], **more: Any) -> list[Case]:
    """Return one case for each shape and dtype; `more` are other arguments of `inputs`."""
    found, format, panels = [], more.get("format", DENSE_MATRIX), more.get("panels", False)
    name = "" if format.is_dense else f" {format}"
    name += " float16" * ("weight_dtype" in more) + " INT8 activations" * ("activations" in more) + " panels" * panels
    for tokens, width, out in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            dense = out * width * more.get("weight_dtype", dtype).itemsize
            stored = dense if format.is_dense else format.nbytes(out, width)
            found.append(
                Case(
                    f"{tokens}x{width}x{out}{name}",
                    {"tokens": tokens, "width": width, "out": out, "dtype": dtype, "bias": out % 2 == 1 or panels}
                    | more,
                    CaseCost(stored + tokens * (width + out) * dtype.itemsize, 2 * tokens * width * out),
                    timed=width > (1000 if format.words else 500) and dtype == torch.bfloat16,
                )
            )
    return found


def quantized_cases() -> list[Case]:
    """Return the cases of each storage format. INT8 by row and our own INT4 have all shapes; other formats have small
    shapes and shapes of one token; integer formats also have cases with INT8 activations."""
    found = cases(DECODE + PREFILL + SMALL + ODD_WIDTHS, format=INT8_MATRIX)
    found += cases(PANELS, format=INT8_MATRIX, panels=True)
    for format in GROUPED:
        ours = format.codes == "int4" and format.minima is None
        found += cases((DECODE + PREFILL if ours else [DECODE[0], DECODE[3]]) + SMALL, format=format)
    found += (case for format in NAMED for case in cases(IN_WORDS, format=format))
    found += cases(DECODE[:4] + SMALL + ODD_WIDTHS, format=INT8_MATRIX, activations="int8")
    found += cases(PANELS + DECODE[1:3], format=INT8_MATRIX, activations="int8", panels=True)
    for format in (INT4, Q4_1, *NAMED):
        found += cases(IN_GROUPS, format=format, activations="int8")
        found += cases(DECODE[1:2], format=format, activations="int8", panels=True)
    return found


def terms(width: int, format: MatrixFormat = DENSE_MATRIX, activations: str = "float", **_: object) -> float:
    """Return the number of rounding terms for agreement.py. Sums of an INT8 row are exact; rounding occurs in the
    conversion to float32, the two scales, and the bias.
    """
    return 4 if activations == "int8" and not format.group else 4 + math.sqrt(width)


def in_float64(
    x: Tensor, weight: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, codes: str, group: int,
    activations: str,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return x as it is multiplied, the matrix and the bias, all in float64. INT8 activations are rounded in x's own
    type before the conversion."""
    format, least = MatrixFormat.of(codes, group, scales, minima), None if minima is None else from_panels(minima)
    scales = from_panels(scales)
    scales = scales.double() if scales.is_floating_point() else scales
    matrix = dequantize_matrix(format, from_panels(weight), scales, None if least is None else least.double()).double()
    x = x.double()
    return rounded_to_int8(x, by_row=not group) if activations == "int8" else x, matrix, bias


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.double()
    return linear_reference(x.double(), from_panels(weight).double(), bias)


def size(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the typical size of a sum of products with random signs: the root of the sum of squares, and for a row of
    outputs its maximum."""
    squares = exact(x.double().square(), weight.double().square(), None if bias is None else bias.double().square())
    return squares.sqrt().amax(-1, keepdim=True)


DENSE_CASES = cases(DECODE + PREFILL + SMALL) + cases(PANELS, panels=True)
DENSE_CASES += cases(PANELS[:2], panels=True, weight_dtype=torch.float16)
SUITES = (
    Suite("linear", inputs, compiled_kernels.linear, tuple(DENSE_CASES), terms, exact=exact, scale=size),
    Suite(
        "linear_quantized", inputs, compiled_kernels.linear_quantized, tuple(quantized_cases()), terms,
        exact=lambda *inputs: exact(*in_float64(*inputs)),
        scale=lambda *inputs: size(*in_float64(*inputs)) * (inputs[-1] == "float"),
    ),
)  # fmt: skip
