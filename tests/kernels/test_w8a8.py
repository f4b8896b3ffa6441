"""Activations in INT8 times weights in INT8: one rule, exact sums, the same bits wherever they are computed."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked import to_panels
from compiled_kernels.cases import Case, CaseCost
from compiled_kernels.level import Level, limited_to
from compiled_kernels.linear import mlir
from compiled_kernels.linear_w8a8.api import MAX_EXACT_COLUMNS, linear_w8a8_reference, quantize_rows
from tests.helpers.kernels import needs_mlir
from tests.helpers.levels import at_every_level, at_executed_levels
from tests.thorough import run_seed, tries

needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is missing: apt install binutils")
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1.0, 0.0, 1e30, 1e-30, 1e-42]  # of a row


def operands(
    count: int, width: int, out: int, dtype: torch.dtype, biased: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rows of any size, the first of one number, the last of halves at a scale of one, each as near to the one value as
    to the other; weights of which some rows are as large as can be."""
    generator = torch.Generator().manual_seed(run_seed())
    x = torch.randn(count, width, generator=generator) * torch.tensor((SIZES * count)[:count])[:, None]
    x[-1] = torch.arange(width) % 20 - 9.5
    x[-1, 0] = 127
    if count > 1:
        x[0] = 0.5
    values = torch.randint(-128, 128, (out, width), generator=generator).to(torch.int8)
    values[::3], values[1::3] = -128, 127
    bias = torch.randn(out, generator=generator).to(dtype) if biased else None
    return x.to(dtype), values, torch.rand(out, generator=generator) + 0.01, bias


def bits(x: Tensor) -> Tensor:
    return x.float().view(torch.int32)


# Widths of each kind of word: whole vectors of bytes, of pairs, of neither, and blocks of a panel; outs, whether in
# panels, and rows: one function of each few, and of many.
SHAPES = [
    (24, 12, False, 14), (1, 1, False, 3), (33, 12, False, 7), (64, 1, False, 2), (96, 12, False, 3),
    (352, 64, True, 14), (8, 192, True, 7), (72, 64, True, 3), (72, 64, True, 6), (64, 192, True, 13),
]  # fmt: skip


@needs_mlir
@at_every_level
@pytest.mark.parametrize(("width", "out", "panels", "count"), SHAPES)
def test_bits_equal_reference_at_every_level(
    width: int, out: int, panels: bool, count: int, level: Level
) -> None:
    """Integer sums are exact: the bits of a row depend on neither the instruction nor the number of rows."""
    x, values, scales, bias = operands(count, width, out, DTYPES[count % 2], biased=count % 3 == 0)
    expected = linear_w8a8_reference(x, values, scales, bias)
    with limited_to(level):
        stored = to_panels(values) if panels else values
        found = compiled_kernels.linear_w8a8(x, stored, scales, bias, Backend.MLIR)
        alone = compiled_kernels.linear_w8a8(x[-1:], stored, scales, bias, Backend.MLIR)
    assert found.dtype == x.dtype and torch.equal(bits(found), bits(expected))
    assert torch.equal(bits(alone), bits(expected[-1:]))


@settings(max_examples=tries(40))
@given(
    dtype=st.sampled_from(DTYPES), backend=st.sampled_from([Backend.EAGER, Backend.INDUCTOR]),
    columns=st.integers(1, 3000),
)  # fmt: skip
def test_torchs_own_products_are_exact_too(dtype: torch.dtype, backend: Backend, columns: int) -> None:
    x, values, scales, bias = operands(5, 8, 64, dtype)
    row = x[:, :1] * torch.linspace(0.5, 1, columns).to(dtype)  # of one sign: sums as large as can be
    values = values[:, :1].repeat(1, columns)
    expected = linear_w8a8_reference(row, values, scales, bias)
    assert torch.equal(bits(compiled_kernels.linear_w8a8(row, values, scales, bias, backend)), bits(expected))


@given(
    numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    dtype=st.sampled_from(DTYPES),
)
@example(numbers=[0.0, -0.0], dtype=torch.float32)
def test_quantization_keeps_its_rule(numbers: list[float], dtype: torch.dtype) -> None:
    """Within half a scale; the largest is 127 but where numbers are so small that the least scale is larger; a sign is
    kept; rounded half to even."""
    x = torch.tensor([numbers]).to(dtype)
    if not x.isfinite().all():
        return
    values, scales = quantize_rows(x)
    away = (values.double() * scales.double()[:, None] - x.double()).abs()
    assert (away <= scales.double() * (0.5 + 1e-5)).all()
    assert (values * x.float().sign() >= 0).all() and int(values.to(torch.int32).abs().max()) <= 127
    if float(x.float().abs().max()) / 127 >= torch.finfo(torch.float32).tiny:
        assert int(values.to(torch.int32).abs().max()) == 127


def test_half_goes_to_even() -> None:
    values, scales = quantize_rows(torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert scales.tolist() == [1.0] and values.tolist() == [[127, 0, 2, 2, 0, -2]]
    assert quantize_rows(torch.zeros(2, 3))[0].tolist() == [[0, 0, 0]] * 2


@needs_mlir
@at_every_level
@pytest.mark.parametrize("weight", [-128, 127])
def test_the_widest_row_of_the_largest_numbers(level: Level, weight: int) -> None:
    """Intermediate sums (of unsigned bytes) may overflow an int32, the result does not."""
    values = torch.full((64, MAX_EXACT_COLUMNS), weight, dtype=torch.int8)
    x = torch.full((1, MAX_EXACT_COLUMNS), 127.0)
    with limited_to(level):
        for stored in (values, to_panels(values)):
            out = compiled_kernels.linear_w8a8(x, stored, torch.ones(64), None, Backend.MLIR)
            assert out.unique().tolist() == [float(127 * weight * MAX_EXACT_COLUMNS)]


MULTIPLIED = {Level.V3: "vpmaddwd", Level.V4: "vpmaddwd", Level.V4_VNNI: "vpdpbusd", Level.V4_BF16: "vpdpbusd"}


@needs_mlir
@needs_objdump
@at_executed_levels
@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("panels", [False, True], ids=["rows", "panels"])
def test_it_is_multiplied_as_the_level_does(level: Level, tokens: int, panels: bool) -> None:
    """Bytes where there are dot products of bytes, pairs elsewhere; never by VPMADDUBSW, whose sums saturate."""
    arguments = {"tokens": tokens, "width": 128, "out": 64, "dtype": torch.bfloat16, "bias": False, "panels": panels}
    with limited_to(level):
        asm = mlir.stages(Case("shown", arguments, CaseCost(0, 0)), "linear_w8a8")["asm"]
    found = set(re.findall(r"vpdpbusd|vpmaddwd|vpmaddubsw|vpmulld", asm))
    assert found == {MULTIPLIED[level]}
