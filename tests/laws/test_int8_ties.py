"""Activations in INT8 are rounded half to even on every backend."""

from __future__ import annotations

import pytest
import torch

import compiled_kernels
from compiled_kernels import Backend, backend_problems

WIDTH = 64


@pytest.mark.skipif(bool(backend_problems()[Backend.MLIR]), reason="torch-mlir is not installed")
def test_a_row_of_ties_has_the_bits_of_the_specification() -> None:
    """The largest is 127, so that the scale is 1 and halves are ties."""
    row = torch.tensor([127.0, *(place - 31 + 0.5 for place in range(WIDTH - 1))])
    values = torch.eye(WIDTH, dtype=torch.int8)
    given = row[None], values, torch.ones(WIDTH), None, None, "int8", 0, "int8"
    expected = compiled_kernels.linear_quantized(*given, backend=Backend.EAGER)
    assert torch.equal(compiled_kernels.linear_quantized(*given, backend=Backend.MLIR), expected)
    assert torch.equal(expected[0], row.round())
