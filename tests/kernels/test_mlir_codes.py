"""Codes in few bits become the numbers that they stand for, all of them and exactly: a row of x that is one at one
column and zero elsewhere picks the numbers of that column."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.level import Level, limited_to
from compiled_kernels.linear.cases import NAMED
from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from tests.helpers.kernels import needs_mlir
from tests.helpers.levels import at_every_level

WIDTH, OUT = 256, 64
EXPONENT_BIAS = 127  # a scale of one, where scales are exponents; others would be subnormal, which AVX512-BF16 flushes
FORMATS = (*NAMED, *(MatrixFormat(codes, group) for codes in ("int8", "fp8") for group in (0, 64)))


def numbers_of(picked: Tensor, product: Tensor) -> bool:
    return torch.equal(product.T.float(), picked.to(product.dtype).float())


@needs_mlir
@at_every_level
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_code_of_a_format_is_its_number(format: MatrixFormat, level: Level) -> None:
    """Drawn bits hold every code; scales of one and minima of a quarter keep the numbers exact."""
    ones = {torch.uint8: EXPONENT_BIAS}
    parts = {
        part: torch.full(shape, ones.get(dtype, 1.0) if part == "scales" else 0.25).to(dtype)
        for part, (shape, dtype) in format.storage(OUT, WIDTH).items()
    }
    stored = parts["weight"]
    bits = torch.randint(-(2**31), 2**31 - 1, stored.shape, generator=torch.Generator().manual_seed(5))
    bits = bits.to(torch.int32 if format.words else torch.int8)
    if format.codes == "fp8":
        bits[(bits & 127) == 127] = 0  # NaN, which is not for these kernels
    parts["weight"] = bits.view(stored.dtype)
    picked = dequantize_matrix(format, *parts.values())
    given: list[Any] = [*parts.values(), *[None] * (4 - len(parts)), format.codes, format.group, "float"]
    with limited_to(level):
        for dtype, count in ((torch.float32, TILE_ROWS), (torch.bfloat16, WIDTH)):  # of few rows, and of many
            rows = torch.eye(WIDTH, dtype=dtype)[-count:]
            found = compiled_kernels.linear_quantized(rows, *given, backend=Backend.MLIR)
            assert numbers_of(picked[:, -count:], found), dtype
