"""Products by experts: equal to float64 however rows fall on experts, at every level, and an expert that no row names
is not read, in the strict sense: its memory may not even be readable. The bits of a row alone: `test_invariance.py`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked import to_panels
from compiled_kernels.cases import random_normal
from compiled_kernels.expert_linear.cases import random_stack, spoil
from compiled_kernels.expert_linear.stacks import stack_format, stack_from_panels, stack_to_panels
from compiled_kernels.level import Level, limited_to
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, MatrixFormat
from compiled_kernels.linear.planes import pack_planes
from compiled_kernels.linear.quantize import dequantize_matrix
from compiled_kernels.linear.words import powers_of_two
from tests.helpers.kernels import PROBLEMS, kernel_problem, needs_mlir
from tests.helpers.levels import at_every_level
from tests.thorough import THOROUGH, run_seed, tries

WIDTH, OUT, EXPERTS = 352, 128, 5  # two blocks along the width, of which the second is shorter
INT4 = MatrixFormat("int4", 32, torch.float16)
CODES = [
    *(MatrixFormat("int8", group, torch.float16) for group in (16, 32)),
    *(replace(INT4, group=group) for group in (8, 32, 176)),
    *(MatrixFormat.named(name) for name in ("q5_0", "mxfp4")),
]
WITH_MINIMA = [
    *(replace(INT4, minima=dtype) for dtype in (torch.float16, torch.float32)),
    *(MatrixFormat.named(name) for name in ("q5_1", "q5_k", "q6_k")),
]
EVERY = [DENSE_MATRIX, INT8_MATRIX, MatrixFormat("fp8"), *CODES, *WITH_MINIMA]
Stack = tuple[Tensor, Tensor | None, Tensor | None]


def drawn(format: MatrixFormat, seed: int, dtype: torch.dtype = torch.float32) -> Stack:
    width = 512 if format.unit == 256 else WIDTH
    return random_stack(torch.Generator().manual_seed(seed), format, (EXPERTS, OUT, width), dtype)


def inputs(experts: list[int], format: MatrixFormat, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Return rows that name these experts, and a stack in panels of which all other experts are NaN."""
    stack = drawn(format, run_seed(), dtype)
    spoil(stack, [each for each in range(EXPERTS) if each not in experts])
    width = 512 if format.unit == 256 else WIDTH
    x = random_normal(torch.Generator().manual_seed(run_seed()), dtype, (len(experts), width)) * width**-0.5
    weight, *beside = stack_to_panels(*stack)
    return x, torch.tensor(experts), weight, None, *beside, format.codes


@needs_mlir
@at_every_level
@pytest.mark.parametrize("format", EVERY, ids=str)
def test_any_count_of_rows_equals_float64_at_every_level(format: MatrixFormat, level: Level) -> None:
    """Experts with 0 to 15 rows: every last tile of few rows, and many; one that takes all."""
    for dtype in (torch.float32, torch.bfloat16) if format.is_dense else (torch.float32,):
        for most in (1, 2, 3, 4, 5, 6, 7, 15):
            given_ = inputs([1] * most + [4] * (most // 2), format, dtype)
            with limited_to(level):
                assert kernel_problem("expert_linear", Backend.MLIR, {"width": WIDTH}, inputs=given_) is None, most


@needs_mlir
@pytest.mark.parametrize("format", CODES, ids=str)
def test_a_group_is_summed_apart_and_scaled_once(format: MatrixFormat) -> None:
    """The bits are those of dense products of each group's codes, times its scale, added in order."""
    for rows in (3, 40):
        x, expert, *panels = inputs([each % EXPERTS for each in range(rows)], format)
        weight, scales = drawn(format, run_seed())[:2]
        assert scales is not None
        ones = torch.full_like(scales, 128) if format.codes == "mxfp4" else torch.ones_like(scales)
        numbers = dequantize_matrix(format, weight.flatten(0, 1), ones.flatten(0, 1)).view(EXPERTS, OUT, -1)
        found = compiled_kernels.expert_linear(x, expert, *panels, backend=Backend.MLIR)
        total, steps = torch.zeros(rows, OUT), powers_of_two(scales) if format.codes == "mxfp4" else scales
        for at in range(0, WIDTH, format.group):
            columns = slice(at, at + format.group)
            one = to_panels(numbers[..., columns].contiguous())
            sums = compiled_kernels.expert_linear(x[:, columns].contiguous(), expert, one, backend=Backend.MLIR)
            scale = steps[expert][..., at // format.group].double()
            total = (total.double() + sums.double() * scale).float()  # float64 holds the product: one rounding
        assert torch.equal(found, total)


@settings(max_examples=tries(20))
@given(st.sampled_from(EVERY), st.integers(0, 99))
def test_codes_in_panels_are_a_rearrangement(format: MatrixFormat, seed: int) -> None:
    stack = drawn(format, seed)
    laid_out, width = stack_to_panels(*stack), 512 if format.unit == 256 else WIDTH
    for _, scales, minima in (stack, laid_out):
        assert stack_format(format.codes, width, scales, minima) == format
    for given_, panels, back in zip(stack, laid_out, stack_from_panels(*laid_out), strict=True):
        assert (given_ is None) == (panels is None)
        if given_ is not None and panels is not None and back is not None:
            assert torch.equal(given_.float(), back.float()) and given_.nbytes == panels.nbytes


@needs_mlir
def test_every_exponent_in_a_product() -> None:
    """Rows of the identity: the product is the matrix, every code with every exponent whose numbers are finite."""
    codes, format = pack_planes((torch.arange(32) % 16).expand(64, 32), (4,)), MatrixFormat.named("mxfp4")
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    e2m1 = torch.cat([e2m1, -e2m1]).repeat(2)
    for first in (0, 64, 128, 189):
        scales = torch.arange(first, first + 64).to(torch.uint8)[:, None]
        panels, its_scales, _ = stack_to_panels(codes[None], scales[None], None)
        rows = torch.eye(32), torch.zeros(32, dtype=torch.long)
        assert panels is not None
        found = compiled_kernels.expert_linear(*rows, panels, None, its_scales, None, "mxfp4", Backend.MLIR)
        assert torch.equal(found.T, dequantize_matrix(format, codes, scales)), first
        assert torch.equal(found.T.double(), e2m1 * 2.0 ** (scales.double() - 127)), first


@needs_mlir
def test_no_rows_give_no_rows() -> None:
    x, expert, *stack = inputs([0], DENSE_MATRIX)
    found = compiled_kernels.expert_linear(x[:0], expert[:0], *stack, backend=Backend.MLIR)
    assert found.shape == (0, OUT)


KINDS = ["dense", "int8", "int8 in groups", "int4", "mxfp4", "q5_1"]
WAYS = [
    f"{backend}/{layout}/{form}/{rows}/{kind}"
    for backend, layout, form, rows in (
        (Backend.EAGER, "rows", "written", 9), (Backend.EAGER, "panels", "written", 9),
        (Backend.INDUCTOR, "rows", "compiled", 2), (Backend.INDUCTOR, "rows", "written", 9),
        *((Backend.MLIR, layout, "written", rows) for layout in ("rows", "panels") for rows in (2, 9)),
    )
    for kind in KINDS
    if not PROBLEMS[backend] and (form != "compiled" or kind in ("dense", "int8 in groups") or THOROUGH)
]  # fmt: skip


def read_in_a_process(which: str, *ways: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.kernels.unnamed_experts", which, *ways]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)


def test_experts_that_no_row_names_are_never_read() -> None:
    """Their memory is taken away (mprotect), that of codes and of scales: a single read of it would end the process."""
    done = read_in_a_process("unnamed", *WAYS)
    assert done.stdout.splitlines() == WAYS and done.returncode == 0, f"after {done.stdout}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("way", [f"{Backend.EAGER}/rows/written/9/dense", *WAYS[-1:]])
def test_check_of_unnamed_experts_can_fail(way: str) -> None:
    done = read_in_a_process("read", way)
    assert done.returncode < 0 and not done.stdout
