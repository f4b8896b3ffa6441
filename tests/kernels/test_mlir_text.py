"""Kernels written as MLIR text: few functions serve all numbers of rows, and the writer's own words are right. That
they equal float64 is `test_agreement.py`'s."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels import Backend
from compiled_kernels.cases import Case, CaseCost
from compiled_kernels.linear import mlir
from compiled_kernels.mlir_text import Lines, largest_divisor, number
from tests.helpers.kernels import kernel_problem, needs_mlir


@needs_mlir
@pytest.mark.parametrize("operator", ["linear", "linear_int8", "linear_grouped"])
def test_new_numbers_of_rows_stop_compiling(operator: str) -> None:
    """One function for each number below four, one for all others; and it stays a function of a few hundred lines."""
    compiled = mlir._compiled
    row = {"width": 48, "out": 11, "dtype": torch.bfloat16, "bias": True}
    if operator == "linear_grouped":
        row |= {"codes": "int4", "group": 16, "scales": torch.float16, "minima": None}
    before = compiled.cache_info().misses
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 130, 513, 0):
        assert kernel_problem(operator, Backend.MLIR, row | {"tokens": tokens}, tokens) is None, tokens
    assert compiled.cache_info().misses - before == 4
    shown = mlir.stages(Case("chosen", row | {"tokens": 513}, CaseCost(0, 0)), operator)
    assert shown["vector"].count("\n") < 600


@given(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_divisor(count: int, most: int) -> None:
    found = largest_divisor(count, most)
    assert count % found == 0 and found <= most
    assert found == most or count % (2 * found) != 0


@given(st.floats(-(2.0**90), 2.0**90, width=32))
def test_numbers_are_read_back(value: float) -> None:
    assert "." in number(value)
    assert torch.tensor(float(number(value))) == torch.tensor(value)


@needs_mlir
@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_folded_totals_are_the_sums(lanes: int) -> None:
    """totals() by its own lines, carried out in torch."""
    lines = Lines()
    vectors = torch.randn(lanes, lanes, dtype=torch.float64)
    values = {f"%x{i}": vectors[i] for i in range(lanes)}
    result = lines.hsums(list(values), lanes)
    for line in lines.lines:
        name, expression = line.split(" = ", 1)
        if expression.startswith("vector.shuffle"):
            left, right, *_ = expression.removeprefix("vector.shuffle ").split(" ")
            picked = [int(i) for i in expression[expression.index("[") + 1 : expression.index("]")].split(",")]
            values[name] = torch.cat([values[left.rstrip(",")], values[right]])[picked]
        else:
            left, right = expression.removeprefix("arith.addf ").split(" : ")[0].split(", ")
            values[name] = values[left] + values[right]
    assert torch.allclose(values[result], vectors.sum(dim=1))
