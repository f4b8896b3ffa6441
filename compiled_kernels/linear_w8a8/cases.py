from __future__ import annotations

import math

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels.blocked import from_panels, to_panels
from compiled_kernels.blocked.layout import scales_to_panels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal
from compiled_kernels.linear.api import linear_reference
from compiled_kernels.linear.matrix_format import INT8_MATRIX, WORDS, MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix, quantize_matrix
from compiled_kernels.linear_w8a8.api import rounded_to_int8

# (rows, width, out): decode and prefill through matrices of SmolLM2 and TinyLlama; ragged ones, of each kind of word.
ROWS = [(1, 576, 3072), (1, 2048, 11264), (1, 5632, 2048), (16, 576, 3072)]
SMALL = [(1, 64, 40), (2, 96, 40), (3, 128, 7), (5, 33, 12), (33, 72, 17)]
PANELS = [*ROWS, (512, 576, 3072), (4, 96, 128), (6, 352, 64), (7, 64, 64), (385, 704, 192)]
IN_GROUPS = [(1, 256, 40), (3, 512, 7), (33, 256, 17), (1, 2048, 11264)]
FORMATS = {"int8": INT8_MATRIX, "int4": MatrixFormat("int4", 64, torch.float16)} | {
    name: MatrixFormat.named(name) for name in WORDS
}


def inputs(
    generator: torch.Generator, tokens: int, width: int, out: int, dtype: torch.dtype, bias: bool,
    panels: bool = False, format: str = "int8",
) -> tuple:  # fmt: skip
    """Rows of very different sizes, as activations are; the second of zeros."""
    sizes = 10 ** torch.empty(tokens, 1).uniform_(-3, 3, generator=generator)
    x = (random_normal(generator, torch.float32, (tokens, width)) * sizes).to(dtype)
    x[1:2] = 0
    weight = random_normal(generator, torch.float32, (out, width)) * width**-0.5
    if FORMATS[format].group:  # zeros in the middle would hide minima
        weight = weight + random_normal(generator, torch.float32, (out, 1)) * width**-0.5
    values, *beside = quantize_matrix(weight, FORMATS[format])
    if panels:
        values, beside = to_panels(values), [each if each.ndim == 1 else scales_to_panels(each) for each in beside]
    scales, minima = (*beside, None)[:2]
    added = random_normal(generator, dtype, (out,)) if bias else None
    return x, values, scales, added, minima, FORMATS[format].codes, FORMATS[format].group


def cases() -> tuple[Case, ...]:
    found = []
    shapes = [(*shape, False, "int8") for shape in ROWS + SMALL] + [(*shape, True, "int8") for shape in PANELS]
    shapes += [(*shape, shape[2] % 64 == 0, name) for name in FORMATS if name != "int8" for shape in IN_GROUPS]
    for tokens, width, out, panels, format in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            moved = FORMATS[format].nbytes(out, width) + tokens * (width + out) * dtype.itemsize
            found.append(
                Case(
                    f"{tokens}x{width}x{out}"
                    + (f" {format}" if FORMATS[format].group else " panels" if panels else ""),
                    {"tokens": tokens, "width": width, "out": out, "dtype": dtype, "bias": out % 2 == 1 or panels}
                    | ({"panels": True} if panels else {})
                    | ({"format": format} if FORMATS[format].group else {}),
                    CaseCost(moved, 2 * tokens * width * out),
                    timed=width > 500 and dtype == torch.bfloat16,
                )
            )
    return tuple(found)


def terms(width: int, format: str = "int8", **_: object) -> float:
    """Sums are exact: what rounds is their way to float32, two scales, and the bias; of groups also their sums."""
    return 4 if format == "int8" else 4 + math.sqrt(width)


def exact(
    x: Tensor, stored: Tensor, scales: Tensor, bias: Tensor | None, minima: Tensor | None, codes: str, group: int
) -> Tensor:
    """The rows' INT8 values and scales are what the rule makes of `x` as it is; all that follows is in float64."""
    least = None if minima is None else from_panels(minima).double()
    format = next(each for each in FORMATS.values() if (each.codes, each.group) == (codes, group))
    matrix = dequantize_matrix(format, from_panels(stored), from_panels(scales).double(), least)
    rounded = rounded_to_int8(x.double(), by_row=not group)
    return linear_reference(rounded, matrix, None if bias is None else bias.double())


SUITES = (Suite("linear_w8a8", inputs, compiled_kernels.linear_w8a8, cases(), terms, exact=exact),)
