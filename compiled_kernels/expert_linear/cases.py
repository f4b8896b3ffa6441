from __future__ import annotations

import math

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels.blocked import from_panels
from compiled_kernels.cases import Case, CaseCost, Suite, in_float64, random_normal
from compiled_kernels.expert_linear.packed import dequantize_stack, stack_to_panels


def inputs(
    generator: torch.Generator, rows: int, experts: int, width: int, out: int, bias: bool, dtype: torch.dtype,
    panels: bool = False, named: int | None = None, kind: str = "dense", group: int = 0,
) -> tuple:  # fmt: skip
    """Draw inputs; rows name the first `named` experts, all unless given, and experts that no row names are NaN."""
    expert = torch.randint(named or experts, (rows,), generator=generator)
    shift = random_normal(generator, dtype, (experts, out))
    weight, scales = random_stack(generator, kind, group, (experts, out, width), dtype)
    unnamed = torch.ones(experts, dtype=torch.bool)
    unnamed[expert] = False
    shift[unnamed] = torch.nan
    (weight if scales is None else scales)[unnamed] = 255 if kind == "mxfp4" else torch.nan
    weight, scales = stack_to_panels(weight, scales) if panels else (weight, scales)
    return random_normal(generator, dtype, (rows, width)), expert, weight, shift if bias else None, scales


def random_stack(
    generator: torch.Generator, kind: str, group: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Draw a stack [expert, out, width] of `kind` (see packed.py) whose numbers are near 1: `dtype`, or codes with a
    scale for each `group` columns, of int8 for a row where that is 0."""
    experts, out, width = shape
    if kind == "dense":
        return random_normal(generator, dtype, shape), None
    groups = (experts, out, width // group) if group else (experts, out)
    if kind == "mxfp4":
        scales = torch.randint(123, 129, groups, generator=generator, dtype=torch.uint8)
    else:
        near = 1 / 64 if kind == "int8" else 1 / 4
        scales = near * (0.5 + torch.rand(groups, generator=generator)).to(torch.float16 if group else torch.float32)
    if kind == "int8":
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8), scales
    return torch.randint(256, (experts, out, width // 2), generator=generator, dtype=torch.uint8), scales


def plain(weight: Tensor, scales: Tensor | None) -> Tensor:
    """Return a stack's numbers, row by row, in float64."""
    rows = from_panels(weight)
    return (rows if scales is None else dequantize_stack(rows, from_panels(scales))).double()


def terms(width: int, **_: object) -> float:
    return 4 + math.sqrt(width)


def scale(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """Return the typical size of a sum of products of either sign: the root of the sum of their squares; of a row the
    largest."""
    shift = None if bias is None else bias.double().square()
    squares = compiled_kernels.expert_linear(x.double().square(), expert, plain(weight, scales).square(), shift)
    return squares.sqrt().amax(-1, keepdim=True)


def exact(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    return compiled_kernels.expert_linear(*in_float64((x, expert, plain(weight, scales), bias)))


# (rows, experts, width, out, whether in panels, experts named): decode and prefill of OLMoE's kind, ragged ones, one
# expert that takes all, more experts than rows.
SHAPES = [
    (4, 32, 576, 1536, False, None), (64, 32, 576, 1536, False, None), (5, 3, 16, 7, False, None),
    (1, 4, 33, 5, False, None), (9, 4, 48, 40, False, 1), (8, 16, 576, 1536, True, None),
    (256, 16, 576, 1536, True, None), (5, 3, 64, 64, True, None), (40, 4, 352, 192, True, 1),
    (64, 3, 96, 128, True, None),
]  # fmt: skip
# Codes: (rows, experts, width, out, whether in panels, kind, columns that share a scale).
CODES = [
    (4, 32, 576, 1536, False, "int4", 32), (8, 16, 576, 1536, True, "int4", 32), (256, 16, 576, 1536, True, "int4", 32),
    (8, 16, 576, 1536, True, "mxfp4", 32), (256, 16, 576, 1536, True, "mxfp4", 32), (5, 3, 64, 7, False, "mxfp4", 32),
    (8, 16, 576, 1536, True, "int8", 0), (5, 3, 33, 7, False, "int8", 0), (8, 3, 96, 64, True, "int8", 32),
    (5, 3, 48, 7, False, "int4", 8), (7, 4, 48, 40, False, "int8", 16),
]  # fmt: skip
BITS = {"int8": 8, "int4": 4, "mxfp4": 4}

SUITES = (
    Suite(
        "expert_linear",
        inputs,
        compiled_kernels.expert_linear,
        tuple(
            Case(
                f"{rows} of {named or experts} {width}x{out}" + " panels" * panels + " one takes all" * (named == 1),
                {"rows": rows, "experts": experts, "width": width, "out": out, "bias": True, "dtype": dtype}
                | {"panels": panels, "named": named},
                CaseCost(min(rows, named or experts) * width * out * dtype.itemsize, 2 * rows * width * out),
                timed=width > 500,
            )
            for rows, experts, width, out, panels, named in SHAPES
            for dtype in (torch.float32, torch.bfloat16)
        )
        + tuple(
            Case(
                f"{rows} of {experts} {width}x{out} {kind}" + f" by {group}" * (group > 0) + " panels" * panels,
                {"rows": rows, "experts": experts, "width": width, "out": out, "bias": True, "dtype": dtype}
                | {"panels": panels, "kind": kind, "group": group},
                CaseCost(min(rows, experts) * width * out * BITS[kind] // 8, 2 * rows * width * out),
                timed=width > 500,
            )
            for rows, experts, width, out, panels, kind, group in CODES
            for dtype in (torch.float32, torch.bfloat16)
        ),
        rounding_terms=terms,
        exact=exact,
        scale=scale,
    ),
)
