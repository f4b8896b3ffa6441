"""Kernel equals float64: every operator on every backend, at its bounds (`kernel_rows.py`). Memory that nothing has
written is NaN. Triton's kernels are held to the same rows in its interpreter (`interpreted/laws.py`)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.agreement import disagreement
from compiled_kernels.capabilities import known_gap
from compiled_kernels.cases import Case, case_of, suite_of, suites
from compiled_kernels.check import verdict
from compiled_kernels.level import Level, limited_to
from tests.helpers.kernels import kernel_problem, needs, needs_mlir, on_threads, with_call
from tests.helpers.levels import at_every_level
from tests.kernels.kernel_rows import F32, KERNELS, TABLES, KernelRows, kernel_rows
from tests.thorough import THOROUGH, run_seed

MAX_FLOPS, MAX_CASES = 1_000_000, 8  # of a case, and of an operator's cases at one level, in `make test`
OF_MLIR = [operator for operator in KERNELS if not known_gap(operator, Backend.MLIR, "")]


def test_every_operator_has_rows() -> None:
    assert set(KERNELS) == {suite.operator for suite in suites()}


@pytest.mark.parametrize(
    ("backend", "operator", "row", "threads"), kernel_rows(Backend.EAGER, Backend.INDUCTOR, Backend.MLIR)
)
def test_kernel_equals_float64(backend: Backend, operator: str, row: dict[str, Any], threads: int) -> None:
    with on_threads(threads):
        assert kernel_problem(operator, backend, row, run_seed()) is None


@needs_mlir
@at_every_level
@pytest.mark.parametrize("operator", OF_MLIR)
def test_cases_equal_float64_at_every_level(operator: str, level: Level) -> None:
    """A shape in one type of numbers, the next in another; and the other way round a level below."""
    suite = suite_of(operator)
    with limited_to(level):
        for case in chosen_cases(operator, level.rank):
            assert disagreement(suite, case, suite.make_inputs(case), Backend.MLIR) is None, case.name


def chosen_cases(operator: str, number: int) -> list[Case]:
    shapes: dict[str, list[Case]] = {}
    for case in suite_of(operator).cases:
        if not known_gap(operator, Backend.MLIR, case.name) and (THOROUGH or case.cost.flops < MAX_FLOPS):
            shapes.setdefault(case.shape, []).append(case)
    if THOROUGH:
        return [case for shape in shapes.values() for case in shape]
    chosen = [shape[(number + place) % len(shape)] for place, shape in enumerate(shapes.values())]
    every = -(-len(chosen) // MAX_CASES)
    return chosen[number % every :: every]


@needs(Backend.INDUCTOR)
def test_inductor_mixes_decodes_and_longer_spans() -> None:
    """Decodes among spans are a graph of their own: one of those that `kernel_rows` leaves out."""
    suite = suite_of("paged_attention")
    case = case_of(suite, "mixed float32")
    assert disagreement(suite, case, suite.make_inputs(case), Backend.INDUCTOR) is None


SPOILS = {
    "a hundredth off": lambda out: out * 1.01 + 0.01,
    "last numbers unwritten": lambda out: out.index_fill(-1, torch.tensor([out.shape[-1] - 1]), torch.nan),
    "an infinity": lambda out: out.index_fill(-1, torch.tensor([0]), torch.inf),
    "unwritten": torch.empty_like,
}


@pytest.mark.parametrize("operator", list(KERNELS))
def test_comparison_can_fail(operator: str) -> None:
    case = suite_of(operator).cases[0]
    assert verdict(suite_of(operator), case, Backend.EAGER) == ("ok", "")
    for name, spoil in SPOILS.items():
        wrong = with_call(operator, lambda *inputs, spoil=spoil: on_first(spoil, operator, inputs))
        found = disagreement(wrong, case, wrong.make_inputs(case), Backend.INDUCTOR)
        assert found is not None and ("unwritten" not in name or "NaN" in found), (name, found)
    assert not torch.are_deterministic_algorithms_enabled()


def on_first(spoil: Any, operator: str, inputs: tuple) -> Any:
    """Return the operator's outputs, the first of them spoiled."""
    outputs = suite_of(operator).call(*inputs, backend=Backend.EAGER)
    if isinstance(outputs, Tensor):
        return spoil(outputs)
    return (spoil(outputs[0]), *outputs[1:])


SMALLER = ("gated_silu", "linear", "linear_quantized")  # their outputs are as small as a row's inputs
SEVERAL = {"samples": 3, "tokens": 5, "rows": 9}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("operator", "table"), TABLES)
def test_one_row_that_is_off_is_caught(operator: str, table: KernelRows, dtype: str) -> None:
    """Among many right ones, and made as small as it may be: a row is held to its own size, not to the largest's."""
    row = next(table.rows())
    row |= {name: count for name, count in SEVERAL.items() if name in row}
    row |= {"dtype": F32 if operator in ("log_softmax", "top_logprobs") else getattr(torch, dtype)}
    suite = suite_of(operator)
    inputs = suite.input_maker(torch.Generator().manual_seed(0), **row)
    if operator in SMALLER:
        inputs[0][1] *= 2.0**-10  # exact

    def off(out: Tensor) -> Tensor:
        lines = out.view(-1, out.shape[-1])
        line = lines[int(lines.isfinite().all(-1).nonzero()[1])]
        line[int(line.abs().argmax())] *= 1 + (1e-3 if row["dtype"] == F32 else 0.05)
        return out

    wrong = with_call(operator, lambda *inputs: on_first(off, operator, inputs))
    found = kernel_problem(wrong, Backend.INDUCTOR, row, inputs=inputs)
    assert found is not None and "against float64" in found
    assert kernel_problem(suite, Backend.INDUCTOR, row, inputs=inputs) is None


NOT_FINITE = [
    (operator, table, odd)
    for operator, table in TABLES
    for odd in (math.nan, math.inf, *([-math.inf] if operator.startswith("linear") else []))
    if "batch" not in table.axes
]


@pytest.mark.parametrize("backend", [Backend.EAGER, pytest.param(Backend.MLIR, marks=needs_mlir)])
@pytest.mark.parametrize(("operator", "table", "odd"), NOT_FINITE)
def test_numbers_that_are_not_finite_stay_with_their_row(
    operator: str, table: KernelRows, odd: float, backend: Backend
) -> None:
    if known_gap(operator, backend, ""):
        pytest.skip(f"backend {backend} has no kernel of {operator}")
    suite, row = suite_of(operator), next(table.rows())
    row |= {name: count for name, count in SEVERAL.items() if name in row}
    inputs = list(suite.input_maker(torch.Generator().manual_seed(0), **row))
    inputs[operator == "kv_write"][1].view(-1)[-1] = odd
    exact, found = (suite.call(*inputs, backend=each) for each in (Backend.EAGER, backend))
    torch.testing.assert_close(found, exact, equal_nan=True, rtol=1e-4, atol=1e-4)
    if "linear" in operator:
        assert found[::2].isfinite().all() and not found[1].isfinite().any()
