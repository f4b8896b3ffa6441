from __future__ import annotations

import math

import torch

import compiled_kernels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal


def inputs(
    generator: torch.Generator, rows: int, experts: int, width: int, out: int, bias: bool, dtype: torch.dtype
) -> tuple:
    """Draw inputs; experts that no row names are NaN."""
    expert = torch.randint(experts, (rows,), generator=generator)
    weight, shift = (
        random_normal(generator, dtype, (experts, out, width)),
        random_normal(generator, dtype, (experts, out)),
    )
    unnamed = torch.ones(experts, dtype=torch.bool)
    unnamed[expert] = False
    weight[unnamed], shift[unnamed] = torch.nan, torch.nan
    return random_normal(generator, dtype, (rows, width)), expert, weight, shift if bias else None


def terms(width: int, **_: object) -> float:
    return 4 + math.sqrt(width)


def scale(x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the typical size of a sum of products of either sign: the root of the sum of their squares; of a row the
    largest."""
    shift = None if bias is None else bias.double().square()
    squares = compiled_kernels.expert_linear(x.double().square(), expert, weight.double().square(), shift)
    return squares.sqrt().amax(-1, keepdim=True)


SUITES = (
    Suite(
        "expert_linear",
        inputs,
        compiled_kernels.expert_linear,
        tuple(
            Case(
                f"{rows} of {experts} {width}x{out}",
                {"rows": rows, "experts": experts, "width": width, "out": out, "bias": True, "dtype": dtype},
                CaseCost(min(rows, experts) * width * out * dtype.itemsize, 2 * rows * width * out),
                timed=width > 500,
            )
            for rows, experts, width, out in [(4, 32, 576, 1536), (64, 32, 576, 1536), (5, 3, 16, 7), (1, 4, 33, 5)]
            for dtype in (torch.float32, torch.bfloat16)
        ),
        rounding_terms=terms,
        scale=scale,
    ),
)
