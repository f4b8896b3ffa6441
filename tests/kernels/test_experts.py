"""Products by experts: equal to float64 however rows fall on experts, at every level, and an expert that no row names
is not read, in the strict sense: its memory may not even be readable. The bits of a row alone: `test_invariance.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked import to_panels
from compiled_kernels.cases import random_normal
from compiled_kernels.expert_linear.cases import random_stack
from compiled_kernels.expert_linear.packed import (
    E2M1,
    dequantize_stack,
    e2m1_values,
    exponents,
    pack_pairs,
    stack_from_panels,
    stack_group,
    stack_kind,
    stack_to_panels,
    stack_width,
    unpack_pairs,
)
from compiled_kernels.level import Level, limited_to
from tests.helpers.kernels import PROBLEMS, kernel_problem, needs_mlir
from tests.helpers.levels import at_every_level
from tests.thorough import THOROUGH, run_seed, tries

WIDTH, OUT, EXPERTS = 352, 128, 5  # two blocks along the width, of which the second is shorter
CODES = [("int8", 0), ("int8", 16), ("int8", 32), ("int4", 8), ("int4", 32), ("int4", 176), ("mxfp4", 32)]


def inputs(experts: list[int], kind: str, group: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return rows that name these experts, and a stack in panels of which all other experts are NaN."""
    generator = torch.Generator().manual_seed(run_seed())
    stack, scales = random_stack(generator, kind, group, (EXPERTS, OUT, WIDTH), dtype)
    stack = stack * WIDTH**-0.5 if scales is None else stack
    unnamed = [each for each in range(EXPERTS) if each not in experts]
    (stack if scales is None else scales)[unnamed] = 255 if kind == "mxfp4" else torch.nan
    x = random_normal(generator, dtype, (len(experts), WIDTH))
    return x, torch.tensor(experts), *stack_to_panels(stack, scales)


@needs_mlir
@at_every_level
@pytest.mark.parametrize(("kind", "group"), [("dense", 0), *CODES])
def test_any_count_of_rows_equals_float64_at_every_level(kind: str, group: int, level: Level) -> None:
    """Experts with 0 to 15 rows: every last tile of few rows, and many; one that takes all."""
    for dtype in (torch.float32, torch.bfloat16) if kind == "dense" else (torch.float32,):
        for most in (1, 2, 3, 4, 5, 6, 7, 15):
            x, expert, stack, scales = inputs([1] * most + [4] * (most // 2), kind, group, dtype)
            with limited_to(level):
                given_ = x, expert, stack, None, scales
                assert kernel_problem("expert_linear", Backend.MLIR, {"width": WIDTH}, inputs=given_) is None, most


@needs_mlir
@pytest.mark.parametrize(("kind", "group"), [each for each in CODES if each != ("int8", 0)])
def test_a_group_is_summed_apart_and_scaled_once(kind: str, group: int) -> None:
    """The bits are those of dense products of each group's codes, times its scale, added in order."""
    for rows in (3, 40):
        x, expert, codes, scales = inputs([each % EXPERTS for each in range(rows)], kind, group, torch.float32)
        plain, its_scales = stack_from_panels(codes, scales)
        assert its_scales is not None
        ones = torch.full_like(its_scales, 127) if kind == "mxfp4" else torch.ones_like(its_scales)
        numbers = dequantize_stack(plain, ones)
        found = compiled_kernels.expert_linear(x, expert, codes, None, scales, Backend.MLIR)
        total = torch.zeros(rows, OUT)
        for at in range(0, WIDTH, group):
            columns = slice(at, at + group)
            one = to_panels(numbers[..., columns].contiguous())
            sums = compiled_kernels.expert_linear(x[:, columns].contiguous(), expert, one, None, None, Backend.MLIR)
            scale = its_scales[expert][..., at // group]
            scale = torch.exp2(scale.double() - 127) if kind == "mxfp4" else scale.double()
            total = (total.double() + sums.double() * scale).float()  # float64 holds the product: one rounding
        assert torch.equal(found, total)


@settings(max_examples=tries(20))
@given(st.sampled_from(CODES), st.integers(0, 99))
def test_codes_in_panels_are_a_rearrangement(format: tuple[str, int], seed: int) -> None:
    kind, group = format
    codes, scales = random_stack(torch.Generator().manual_seed(seed), kind, group, (3, 64, WIDTH), torch.float32)
    laid_out = stack_to_panels(codes, scales)
    for each in ((codes, scales), laid_out):
        assert (stack_kind(*each), stack_group(*each), stack_width(each[0])) == (kind, group, WIDTH)
    for given_, panels, back in zip((codes, scales), laid_out, stack_from_panels(*laid_out), strict=True):
        assert given_ is not None and panels is not None and back is not None
        assert torch.equal(given_, back) and given_.nbytes == panels.nbytes


def test_every_code_and_exponent() -> None:
    """Both zeros, subnormal exponents and the exponent that is no number."""
    codes, every = torch.arange(16, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    assert torch.equal(unpack_pairs(pack_pairs(codes)), codes)
    values = e2m1_values(codes, torch.float32)
    assert torch.equal(values.view(torch.int32), torch.tensor(E2M1).view(torch.int32))
    assert exponents(every)[:255].double().tolist() == [2.0 ** (each - 127) for each in range(255)]
    assert exponents(every)[255].isnan()


@needs_mlir
def test_every_exponent_in_a_product() -> None:
    """Rows of the identity: the product is the matrix, every code with every exponent whose numbers are finite."""
    codes = pack_pairs((torch.arange(32) % 16).to(torch.uint8).expand(1, 64, 32))
    for first in (0, 64, 128, 189):
        scales = torch.arange(first, first + 64).to(torch.uint8)[None, :, None].contiguous()
        panels, its_scales = stack_to_panels(codes, scales)
        expert = torch.zeros(32, dtype=torch.long)
        found = compiled_kernels.expert_linear(torch.eye(32), expert, panels, None, its_scales, Backend.MLIR)
        assert torch.equal(found.T, dequantize_stack(codes, scales)[0]), first


@needs_mlir
def test_no_rows_give_no_rows() -> None:
    x, expert, *stack = inputs([0], "dense", 0, torch.float32)
    found = compiled_kernels.expert_linear(x[:0], expert[:0], stack[0], None, None, Backend.MLIR)
    assert found.shape == (0, OUT)


KINDS = ["dense", "int8", "int8 in groups", "int4", "mxfp4"]
WAYS = [
    f"{backend}/{layout}/{form}/{rows}/{kind}"
    for backend, layout, form, rows in (
        (Backend.EAGER, "rows", "written", 9), (Backend.EAGER, "panels", "written", 9),
        (Backend.INDUCTOR, "rows", "compiled", 2), (Backend.INDUCTOR, "rows", "written", 9),
        *((Backend.MLIR, layout, "written", rows) for layout in ("rows", "panels") for rows in (2, 9)),
    )
    for kind in KINDS
    if not PROBLEMS[backend] and (form != "compiled" or kind in ("dense", "mxfp4") or THOROUGH)
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
