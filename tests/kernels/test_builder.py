"""Kernels written as MLIR: few functions serve all numbers of rows, and the writer's own words are right. That
they equal float64 is `test_agreement.py`'s."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels import Backend
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.builder.functions import function, text_of
from compiled_kernels.builder.target import Named, largest_divisor
from compiled_kernels.builder.vectors import totals
from compiled_kernels.cases import Case, CaseCost
from compiled_kernels.linear import mlir
from compiled_kernels.linear.matrix_format import INT8_MATRIX, MatrixFormat
from compiled_kernels.mlir import compile_text, stages
from compiled_kernels.mlir.invoke import BoundCall
from tests.helpers.kernels import kernel_problem, needs_mlir


@needs_mlir
@pytest.mark.parametrize("operator", ["linear", "linear_quantized", "linear_quantized by group"])
def test_new_numbers_of_rows_stop_compiling(operator: str) -> None:
    """One function for each number that a tile holds, one for all others (a dense weight row by row: for each below
    four); and it stays a function of a few hundred lines."""
    compiled = mlir._compiled
    name, row = operator.partition(" ")[0], {"width": 48, "out": 11, "dtype": torch.bfloat16, "bias": True}
    if operator != "linear":
        row |= {"format": INT8_MATRIX if operator == "linear_quantized" else MatrixFormat("int4", 16, torch.float16)}
    before = compiled.cache_info().misses
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 130, 513, 0):
        assert kernel_problem(name, Backend.MLIR, row | {"tokens": tokens}, tokens) is None, tokens
    assert compiled.cache_info().misses - before == (4 if operator == "linear" else TILE_ROWS + 1)
    shown = stages(name, Case("chosen", row | {"tokens": 513}, CaseCost(0, 0)))
    assert shown.stages["vector"].count("\n") < 2000


@given(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_divisor(count: int, most: int) -> None:
    found = largest_divisor(count, most)
    assert count % found == 0 and found <= most
    assert found == most or count % (2 * found) != 0


@needs_mlir
@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_folded_totals_are_the_sums(lanes: int) -> None:
    kind = f"memref<{lanes}x{lanes}xf32>"
    vectors, out = torch.randn(lanes, lanes), torch.full((lanes,), torch.nan)

    def emit() -> None:
        arguments = Named("x", kind), Named("out", f"memref<{lanes}xf32>")
        with function("fold", arguments, private=False) as given:
            given["out"].store(totals([given["x"].load(lanes, i, 0) for i in range(lanes)]), 0)

    kernel = compile_text(text_of(emit), "fold")
    BoundCall(kernel.address, (vectors, out))(1)
    assert torch.allclose(out, vectors.sum(dim=1), atol=1e-5)
