from __future__ import annotations

import torch

import compiled_kernels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal


def inputs(generator: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> tuple:
    return (3 * random_normal(generator, dtype, (tokens, 2 * hidden)),)


def clamped_inputs(generator: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> tuple:
    """Draw inputs and a limit for `gated_clamped`; about a third of the numbers exceed the limit."""
    return *inputs(generator, tokens, hidden, dtype), 1.702, 3.0


def _cases(shapes: list[tuple[int, int]]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{tokens}x{hidden}",
            {"tokens": tokens, "hidden": hidden, "dtype": dtype},
            CaseCost(3 * tokens * hidden * dtype.itemsize, 5 * tokens * hidden),
            timed=hidden > 500,
        )
        for tokens, hidden in shapes
        for dtype in (torch.float32, torch.bfloat16)
    )


SHAPES = [(1, 1536), (4, 5632), (16, 1536), (256, 5632), (3, 33), (1, 1)]
SMALL_SHAPES = [(1, 5760), (16, 5760), (3, 33), (1, 1)]
SUITES = (
    Suite("gated_silu", inputs, compiled_kernels.gated_silu, _cases(SHAPES), rounding_terms=lambda **_: 8),
    Suite("gated_gelu", inputs, compiled_kernels.gated_gelu, _cases(SMALL_SHAPES), rounding_terms=lambda **_: 12),
    Suite(
        "gated_clamped",
        clamped_inputs,
        compiled_kernels.gated_clamped,
        _cases(SMALL_SHAPES),
        rounding_terms=lambda **_: 10,
    ),
)
