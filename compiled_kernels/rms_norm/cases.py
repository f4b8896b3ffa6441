from __future__ import annotations

import math

import torch

import compiled_kernels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal


def inputs(generator: torch.Generator, tokens: int, width: int, dtype: torch.dtype) -> tuple:
    return random_normal(generator, dtype, (tokens, width)), random_normal(generator, dtype, (width,)), 1e-5


def inputs_with_residual(generator: torch.Generator, tokens: int, width: int, dtype: torch.dtype) -> tuple:
    x, weight, eps = inputs(generator, tokens, width, dtype)
    return x, random_normal(generator, dtype, (tokens, width)), weight, eps


def cases(moved: int) -> tuple[Case, ...]:
    shapes = [(1, 576), (1, 2048), (4, 2048), (16, 576), (512, 576), (512, 2048), (3, 70), (1, 1)]
    return tuple(
        Case(
            f"{tokens}x{width}",
            {"tokens": tokens, "width": width, "dtype": dtype},
            CaseCost(moved * tokens * width * dtype.itemsize, 4 * tokens * width),
            timed=width > 500,
        )
        for tokens, width in shapes
        for dtype in (torch.float32, torch.bfloat16)
    )


def terms(width: int, **_: object) -> float:
    return 4 + math.sqrt(width)


SUITES = (
    Suite("rms_norm", inputs, compiled_kernels.rms_norm, cases(2), terms),
    Suite(
        "add_rms_norm", inputs_with_residual, compiled_kernels.add_rms_norm, cases(4), terms,
    ),
)  # fmt: skip
