"""Experts whose matrices are codes: products are those of the numbers that the codes stand for, at every level, with
the same bits for a row whichever others there are; on mlir the bits are those of a dense stack of float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend, BackendError, backend_problems
from compiled_kernels.agreement import disagreement
from compiled_kernels.blocked import to_panels
from compiled_kernels.cases import Case, CaseCost, random_normal, suite_of
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
from compiled_kernels.level import Level, available_levels, limited_to
from tests.thorough import tries

SUITE = suite_of("expert_linear")
problem = backend_problems()[Backend.MLIR]
mlir = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")
OUT, WIDTH, EXPERTS = 128, 352, 5  # two blocks along the width, of which the second is shorter
FORMATS = [("int8", 0), ("int8", 16), ("int8", 32), ("int4", 8), ("int4", 32), ("int4", 176), ("mxfp4", 32)]
formats = st.sampled_from(FORMATS)
names = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=40)


@pytest.fixture(params=available_levels(), ids=str)
def level(request: pytest.FixtureRequest) -> Iterator[Level]:
    with limited_to(request.param):
        yield request.param


def inputs(
    experts: list[int], dtype: torch.dtype, kind: str, group: int, panels: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that name these experts, codes and scales; scales of all other experts are NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes, scales = random_stack(generator, kind, group, (EXPERTS, OUT, WIDTH), dtype)
    assert scales is not None
    unnamed = [each for each in range(EXPERTS) if each not in experts]
    scales[unnamed] = 255 if kind == "mxfp4" else torch.nan
    codes, scales = stack_to_panels(codes, scales) if panels else (codes, scales)
    assert scales is not None
    return random_normal(generator, dtype, (len(experts), WIDTH)), torch.tensor(experts), codes, scales


@mlir
@pytest.mark.parametrize("panels", [True, False])
@settings(max_examples=tries(40), deadline=None)
@given(experts=names, dtype=st.sampled_from([torch.float32, torch.bfloat16]), format=formats,
       biased=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
def test_rows_fall_on_experts_in_any_way(
    panels: bool, experts: list[int], dtype: torch.dtype, format: tuple[str, int], biased: bool, seed: int
) -> None:
    x, expert, codes, scales = inputs(experts, dtype, *format, panels, seed)
    bias = random_normal(torch.Generator().manual_seed(seed), dtype, (EXPERTS, OUT)) if biased else None
    case = Case("drawn", {"width": WIDTH}, CaseCost(0, 0))
    assert disagreement(SUITE, case, (x, expert, codes, bias, scales), Backend.MLIR) is None


@pytest.mark.sampled(12)
@mlir
@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_every_level(kind: str, group: int, level: Level) -> None:
    """Experts with 0 to 15 rows: every last tile of few rows, and many."""
    case = Case("counts", {"width": WIDTH}, CaseCost(0, 0))
    for most in (1, 2, 5, 7, 15):
        x, expert, codes, scales = inputs([1] * most + [4] * (most // 2), torch.float32, kind, group, True)
        assert disagreement(SUITE, case, (x, expert, codes, None, scales), Backend.MLIR) is None, most


@mlir
@pytest.mark.parametrize(("kind", "group"), [each for each in FORMATS if each != ("int8", 0)])
@pytest.mark.parametrize("rows", [3, 40])
def test_codes_in_panels_give_the_bits_of_their_numbers(kind: str, group: int, rows: int) -> None:
    """A code times its scale is exact in float32, and the sums are in one order."""
    x, expert, codes, scales = inputs([each % EXPERTS for each in range(rows)], torch.float32, kind, group, True)
    plain, its_scales = stack_from_panels(codes, scales)
    assert its_scales is not None
    dense = to_panels(dequantize_stack(plain, its_scales))
    found = compiled_kernels.expert_linear(x, expert, codes, None, scales, Backend.MLIR)
    assert torch.equal(found, compiled_kernels.expert_linear(x, expert, dense, None, None, Backend.MLIR))


@mlir
@settings(max_examples=tries(20), deadline=None)
@given(experts=names, place=st.integers(0, 39), format=formats, threads=st.integers(1, 3))
def test_a_row_is_the_same_whichever_rows_chose_its_expert(
    experts: list[int], place: int, format: tuple[str, int], threads: int
) -> None:
    x, expert, codes, scales = inputs(experts, torch.float32, *format, True)
    place %= len(experts)
    alone = compiled_kernels.expert_linear(x[[place]], expert[[place]], codes, None, scales, Backend.MLIR)
    if len(experts) > 1:
        x[place - 1] = torch.nan
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        among = compiled_kernels.expert_linear(x, expert, codes, None, scales, Backend.MLIR)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(among[[place]], alone)


@settings(max_examples=tries(20), deadline=None)
@given(format=formats, seed=st.integers(0, 99))
def test_panels_are_a_rearrangement(format: tuple[str, int], seed: int) -> None:
    kind, group = format
    codes, scales = random_stack(torch.Generator().manual_seed(seed), kind, group, (3, 64, WIDTH), torch.float32)
    laid_out = stack_to_panels(codes, scales)
    for each in ((codes, scales), laid_out):
        assert (stack_kind(*each), stack_group(*each), stack_width(each[0])) == (kind, group, WIDTH)
    for given_, ours, back in zip((codes, scales), laid_out, stack_from_panels(*laid_out), strict=True):
        assert given_ is not None and ours is not None and back is not None
        assert torch.equal(given_, back) and given_.nbytes == ours.nbytes


def test_every_code_and_exponent() -> None:
    """Both zeros, subnormal exponents and the exponent that is no number."""
    codes, every = torch.arange(16, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    assert torch.equal(unpack_pairs(pack_pairs(codes)), codes)
    values = e2m1_values(codes, torch.float32)
    assert torch.equal(values.view(torch.int32), torch.tensor(E2M1).view(torch.int32))
    assert exponents(every)[:255].double().tolist() == [2.0 ** (each - 127) for each in range(255)]
    assert exponents(every)[255].isnan()


@mlir
@pytest.mark.parametrize("first", [0, 64, 128, 189])
def test_every_exponent_in_a_product(first: int) -> None:
    """Rows of the identity: the product is the matrix, every code with every exponent whose numbers are finite."""
    scales = torch.arange(first, first + 64).to(torch.uint8)[None, :, None].contiguous()
    codes = pack_pairs((torch.arange(32) % 16).to(torch.uint8).expand(1, 64, 32))
    panels, its_scales = stack_to_panels(codes, scales)
    expert = torch.zeros(32, dtype=torch.long)
    found = compiled_kernels.expert_linear(torch.eye(32), expert, panels, None, its_scales, Backend.MLIR)
    assert torch.equal(found.T, dequantize_stack(codes, scales)[0])


@mlir
def test_scales_of_another_shape_are_refused() -> None:
    x, expert, codes, scales = inputs([0, 1], torch.float32, "int4", 32, True)
    with pytest.raises(BackendError, match="10 scales a row are no groups of whole words of 352 columns"):
        compiled_kernels.expert_linear(x, expert, codes, None, scales[:, :, 1:].contiguous(), Backend.MLIR)
    with pytest.raises(BackendError, match="scales"):
        compiled_kernels.expert_linear(x, expert, codes, None, scales[1:], Backend.MLIR)
