"""Codes in few bits become the numbers that they stand for, all of them and exactly: a row of x that is one at one
column and zero elsewhere picks the numbers of that column."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.level import Level, limited_to
from compiled_kernels.linear.matrix_format import WORDS, MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from tests.helpers.kernels import needs_mlir
from tests.helpers.levels import at_every_level

WIDTH, OUT = 256, 64
GROUPED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def numbers_of(picked: Tensor, product: Tensor) -> bool:
    return torch.equal(product.T.float(), picked.to(product.dtype).float())


@needs_mlir
@at_every_level
@pytest.mark.parametrize("name", WORDS)
def test_every_code_of_a_format_is_its_number(name: str, level: Level) -> None:
    """Words of drawn bits hold every code; scales of one and minima of a quarter keep the numbers exact."""
    format = MatrixFormat.named(name)
    generator = torch.Generator().manual_seed(5)
    parts = {
        part: torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).int() if part == "weight" else
        torch.full(shape, 1.0 if part == "scales" else 0.25, dtype=dtype)
        for part, (shape, dtype) in format.storage(OUT, WIDTH).items()
    }  # fmt: skip
    picked = dequantize_matrix(format, *parts.values())
    with limited_to(level):
        for dtype, count in ((torch.float32, TILE_ROWS), (torch.bfloat16, WIDTH)):  # of few rows, and of many
            rows = torch.eye(WIDTH, dtype=dtype)[-count:]
            given = rows, parts["weight"], parts["scales"], parts.get("minima"), None, name, 0, "float"
            assert numbers_of(picked[:, -count:], compiled_kernels.linear_quantized(*given, Backend.MLIR)), dtype


@needs_mlir
@at_every_level
@pytest.mark.parametrize("codes", GROUPED)
def test_every_byte_is_its_number(codes: str, level: Level) -> None:
    octets = torch.arange(WIDTH, dtype=torch.uint8).expand(OUT, WIDTH).contiguous()
    if codes == "fp8":
        octets[:, [0x7F, 0xFF]] = 0  # NaN, which is not for these kernels
    weight = octets.view(GROUPED[codes])
    with limited_to(level):
        for group in (64, WIDTH):
            scales = torch.ones(OUT, WIDTH // group)
            given = torch.eye(WIDTH), weight, scales, None, None, codes, group, "float"
            found = compiled_kernels.linear_quantized(*given, Backend.MLIR)
            assert numbers_of(weight.float(), found), group
