from __future__ import annotations

import torch

import compiled_kernels
from compiled_kernels.cases import Case, Suite, Work, random


def inputs(generator: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> tuple:
    return (3 * random(generator, dtype, (tokens, 2 * hidden)),)


SUITES = (
    Suite(
        "gated_silu",
        inputs,
        compiled_kernels.gated_silu,
        tuple(
            Case(
                f"{tokens}x{hidden}",
                {"tokens": tokens, "hidden": hidden, "dtype": dtype},
                Work(3 * tokens * hidden * dtype.itemsize, 5 * tokens * hidden),
                timed=hidden > 500,
            )
            for tokens, hidden in [(1, 1536), (4, 5632), (16, 1536), (256, 5632), (3, 33), (1, 1)]
            for dtype in (torch.float32, torch.bfloat16)
        ),
        terms=lambda **_: 8,
    ),
)
