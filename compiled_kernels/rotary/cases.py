from __future__ import annotations

import torch

import compiled_kernels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal


def inputs(generator: torch.Generator, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> tuple:
    angles = torch.rand(tokens, dim // 2, generator=generator, dtype=torch.float64) * 6
    # Heads as they come from a fused projection: a slice of wider rows, not contiguous.
    rows = random_normal(generator, dtype, (tokens, heads + 2, dim))
    return rows[:, :heads], angles.cos().float(), angles.sin().float()


SUITES = (
    Suite(
        "rotary",
        inputs,
        compiled_kernels.rotary,
        tuple(
            Case(
                f"{tokens}x{heads}x{dim}",
                {"tokens": tokens, "heads": heads, "dim": dim, "dtype": dtype},
                CaseCost(2 * tokens * heads * dim * dtype.itemsize + 4 * tokens * dim, 3 * tokens * heads * dim),
                timed=dim == 64 and dtype == torch.bfloat16,
            )
            for tokens, heads, dim in [(1, 9, 64), (16, 9, 64), (512, 32, 64), (5, 3, 2), (2, 1, 96)]
            for dtype in (torch.float32, torch.bfloat16)
        ),
        rounding_terms=lambda **_: 3,
    ),
)
