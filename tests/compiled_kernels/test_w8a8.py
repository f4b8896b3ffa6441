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
from compiled_kernels import Backend, BackendError, backend_problems
from compiled_kernels.blocked import to_panels
from compiled_kernels.cases import Case, CaseCost
from compiled_kernels.level import Level, available_levels, limited_to
from compiled_kernels.linear_w8a8 import mlir
from compiled_kernels.linear_w8a8.api import MAX_EXACT_COLUMNS, linear_w8a8_reference, quantize_rows
from tests.thorough import tries

problem = backend_problems()[Backend.MLIR]
needs_mlir = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")
needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is missing: apt install binutils")
at_every_level = pytest.mark.parametrize("level", available_levels(), ids=str)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
# Widths of each kind of word: whole vectors of bytes, of pairs, of neither, and blocks of a panel.
WIDTHS = {False: [1, 24, 33, 64, 96], True: [8, 64, 72, 352]}
OUTS = {False: [1, 12], True: [64, 192]}
MAX_ROWS = 14


@st.composite
def operands(draw: st.DrawFn, panels: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x of rows of any size, some of zeros, some of one number; weights of which some rows are as large as can be."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    width, out = draw(st.sampled_from(WIDTHS[panels])), draw(st.sampled_from(OUTS[panels]))
    sizes = draw(st.lists(st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e30]), min_size=1, max_size=MAX_ROWS))
    x = torch.randn(len(sizes), width, generator=generator) * torch.tensor(sizes)[:, None]
    if draw(st.booleans()):
        x[0] = draw(st.sampled_from([-127.0, 0.5, 3.0]))
    if draw(st.booleans()):  # halves, and a scale of one: each is as near to the one value as to the other
        x[-1] = torch.arange(width) % 20 - 9.5
        x[-1, 0] = 127
    values = torch.randint(-128, 128, (out, width), generator=generator).to(torch.int8)
    values[::3] = draw(st.sampled_from([-128, -127, 127]))
    scales = torch.rand(out, generator=generator) + 0.01
    dtype = draw(DTYPES)
    bias = torch.randn(out, generator=generator).to(dtype) if draw(st.booleans()) else None
    return x.to(dtype), values, scales, bias


def bits(x: Tensor) -> Tensor:
    return x.float().view(torch.int32)


@needs_mlir
@at_every_level
@pytest.mark.parametrize("panels", [False, True], ids=["rows", "panels"])
@settings(max_examples=tries(12), deadline=None)
@given(data=st.data())
def test_every_level_and_any_rows_give_the_references_bits(level: Level, panels: bool, data: st.DataObject) -> None:
    """Integer sums are exact: the bits of a row depend on neither the instruction nor the number of rows."""
    x, values, scales, bias = data.draw(operands(panels))
    right = linear_w8a8_reference(x, values, scales, bias)
    stored = to_panels(values) if panels else values
    with limited_to(level):
        whole = compiled_kernels.linear_w8a8(x, stored, scales, bias, Backend.MLIR)
        row = data.draw(st.integers(0, len(x) - 1))
        alone = compiled_kernels.linear_w8a8(x[row : row + 1], stored, scales, bias, Backend.MLIR)
    assert whole.dtype == x.dtype and torch.equal(bits(whole), bits(right))
    assert torch.equal(bits(alone), bits(right[row : row + 1]))


@settings(max_examples=tries(40), deadline=None)
@given(x=operands(True), backend=st.sampled_from([Backend.EAGER, Backend.INDUCTOR]), columns=st.integers(1, 3000))
def test_torchs_own_products_are_exact_too(x: tuple, backend: Backend, columns: int) -> None:
    given, values, scales, bias = x
    row = given[:, :1] * torch.linspace(0.5, 1, columns).to(given.dtype)  # of one sign: sums as large as can be
    values = values[:, :1].repeat(1, columns)
    right = linear_w8a8_reference(row, values, scales, bias)
    assert torch.equal(bits(compiled_kernels.linear_w8a8(row, values, scales, bias, backend)), bits(right))


@given(
    numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40), dtype=DTYPES
)
@example(numbers=[0.0, -0.0], dtype=torch.float32)
def test_the_rule(numbers: list[float], dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("backend", [Backend.EAGER, pytest.param(Backend.MLIR, marks=needs_mlir)])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(backend: Backend, odd: float) -> None:
    x, values = torch.ones(3, 64), torch.full((5, 64), 3, dtype=torch.int8)
    x[1, 7] = odd
    out = compiled_kernels.linear_w8a8(x, values, torch.ones(5), None, backend)
    assert out[::2].isfinite().all() and not out[1].isfinite().any()


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


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BackendError, match=r"linear_w8a8: int32 sums are exact up to 131,072 columns, not for 131,073"):
        compiled_kernels.linear_w8a8(
            torch.ones(1, MAX_EXACT_COLUMNS + 1), torch.ones(1, MAX_EXACT_COLUMNS + 1, dtype=torch.int8), torch.ones(1)
        )
    with pytest.raises(BackendError, match="linear_w8a8 has no backend triton; it has eager, inductor, mlir"):
        compiled_kernels.linear_w8a8(
            torch.ones(1, 64), torch.ones(1, 64, dtype=torch.int8), torch.ones(1), None, Backend.TRITON
        )


@needs_mlir
def test_what_native_code_must_not_be_given() -> None:
    x, values, scales = torch.ones(2, 64), torch.ones(64, 64, dtype=torch.int8), torch.ones(64)
    for wrong, message in (
        ((x[:, :-1], values, scales, None), "x as"),
        ((x.double(), values, scales, None), "x as"),
        ((x, values.to(torch.uint8), scales, None), "values as"),
        ((x, values, scales[:-1], None), "scales as"),
        ((x, values, scales, scales[:-1]), "bias as"),
    ):
        with pytest.raises(BackendError, match=message):
            compiled_kernels.linear_w8a8(*wrong, Backend.MLIR)


MULTIPLIED = {Level.V3: "vpmaddwd", Level.V4: "vpmaddwd", Level.V4_VNNI: "vpdpbusd", Level.V4_BF16: "vpdpbusd"}


@needs_mlir
@needs_objdump
@at_every_level
@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("panels", [False, True], ids=["rows", "panels"])
def test_it_is_multiplied_as_the_level_does(level: Level, tokens: int, panels: bool) -> None:
    """Bytes where there are dot products of bytes, pairs elsewhere; never by VPMADDUBSW, whose sums saturate."""
    arguments = {"tokens": tokens, "width": 128, "out": 64, "dtype": torch.bfloat16, "bias": False, "panels": panels}
    with limited_to(level):
        asm = mlir.stages(Case("shown", arguments, CaseCost(0, 0)))["asm"]
    found = set(re.findall(r"vpdpbusd|vpmaddwd|vpmaddubsw|vpmulld", asm))
    assert found == {MULTIPLIED[level]}
