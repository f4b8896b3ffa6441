from __future__ import annotations

import math

import torch

import compiled_kernels
from compiled_kernels.blocked import from_panels, to_panels
from compiled_kernels.cases import Case, CaseCost, Suite, in_float64, random_normal


def inputs(
    generator: torch.Generator, rows: int, experts: int, width: int, out: int, bias: bool, dtype: torch.dtype,
    panels: bool = False, named: int | None = None,
) -> tuple:  # fmt: skip
    """Draw inputs; rows name the first `named` experts, all unless given, and experts that no row names are NaN."""
    expert = torch.randint(named or experts, (rows,), generator=generator)
    weight, shift = (
        random_normal(generator, dtype, (experts, out, width)),
        random_normal(generator, dtype, (experts, out)),
    )
    unnamed = torch.ones(experts, dtype=torch.bool)
    unnamed[expert] = False
    weight[unnamed], shift[unnamed] = torch.nan, torch.nan
    stack = to_panels(weight) if panels else weight
    return random_normal(generator, dtype, (rows, width)), expert, stack, shift if bias else None


def terms(width: int, **_: object) -> float:
    return 4 + math.sqrt(width)


def scale(x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the typical size of a sum of products of either sign: the root of the sum of their squares; of a row the
    largest."""
    shift = None if bias is None else bias.double().square()
    squares = compiled_kernels.expert_linear(x.double().square(), expert, from_panels(weight).double().square(), shift)
    return squares.sqrt().amax(-1, keepdim=True)


def exact(x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return compiled_kernels.expert_linear(*in_float64((x, expert, from_panels(weight), bias)))


# (rows, experts, width, out, whether in panels, experts named): decode and prefill of OLMoE's kind, ragged ones, one
# expert that takes all, more experts than rows.
SHAPES = [
    (4, 32, 576, 1536, False, None), (64, 32, 576, 1536, False, None), (5, 3, 16, 7, False, None),
    (1, 4, 33, 5, False, None), (9, 4, 48, 40, False, 1), (8, 16, 576, 1536, True, None),
    (256, 16, 576, 1536, True, None), (5, 3, 64, 64, True, None), (40, 4, 352, 192, True, 1),
    (64, 3, 96, 128, True, None),
]  # fmt: skip

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
        ),
        rounding_terms=terms,
        exact=exact,
        scale=scale,
    ),
)
