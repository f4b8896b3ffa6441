"""Activations in INT8 times integer codes: one rule, exact sums, the same bits wherever they are computed."""

from __future__ import annotations

import math
import re
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.agreement import nan_filled_memory
from compiled_kernels.blocked import to_panels
from compiled_kernels.blocked.few import FewRows
from compiled_kernels.blocked.layout import regrouped, scales_to_panels, whole_panels
from compiled_kernels.builder.target import Target
from compiled_kernels.decode_step.layer_kernel import int8_buffers
from compiled_kernels.level import Level, limited_to
from compiled_kernels.linear import mlir
from compiled_kernels.linear.api import linear_reference
from compiled_kernels.linear.cases import INT4, NAMED, Q4_1
from compiled_kernels.linear.int8_activations import MAX_EXACT_COLUMNS, int8_reference, quantize_rows, rounded_to_int8
from compiled_kernels.linear.matrix_format import INT8_MATRIX, MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from tests.helpers.kernels import needs_mlir
from tests.helpers.levels import at_every_level, at_executed_levels
from tests.thorough import run_seed, tries

needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is missing: apt install binutils")
multiply = partial(compiled_kernels.linear_quantized, activations="int8")
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1.0, 0.0, 1e30, 1e-30, 1e-42]  # of a row
LARGEST_EXPONENT = 143  # 2^15, which times 96 numbers of 12 and a row of 1e30 is finite in float32


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
def test_bits_equal_reference_at_every_level(width: int, out: int, panels: bool, count: int, level: Level) -> None:
    """Integer sums are exact: the bits of a row depend on neither the instruction nor the number of rows."""
    x, values, scales, bias = operands(count, width, out, DTYPES[count % 2], biased=count % 3 == 0)
    expected = int8_reference(x, values, scales, bias)
    with limited_to(level):
        stored = to_panels(values) if panels else values
        found = multiply(x, stored, scales, None, bias, backend=Backend.MLIR)
        alone = multiply(x[-1:], stored, scales, None, bias, backend=Backend.MLIR)
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
    expected = int8_reference(row, values, scales, bias)
    assert torch.equal(bits(multiply(row, values, scales, None, bias, backend=backend)), bits(expected))


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
            out = multiply(x, stored, torch.ones(64), backend=Backend.MLIR)
            assert out.unique().tolist() == [float(127 * weight * MAX_EXACT_COLUMNS)]


BY_GROUP = {format.codes: format for format in (INT4, *NAMED)} | {
    "int4 by 24": MatrixFormat("int4", 24, torch.float16),
    "q4_1": Q4_1,
    "int4 by 32, minima": MatrixFormat("int4", 32, torch.float16, torch.float32),
    "int8 by 64": MatrixFormat("int8", 64, torch.bfloat16),
    "int8 by 16, minima": MatrixFormat("int8", 16, torch.float32, torch.float16),
}
SHAPES_BY_GROUP = {
    "format": st.sampled_from(list(BY_GROUP.values())), "tokens": st.sampled_from([1, 2, 6, 7, 13]),
    "blocks": st.integers(1, 3), "out": st.integers(1, 130), "dtype": st.sampled_from(DTYPES),
}  # fmt: skip


def operands_by_group(format: MatrixFormat, tokens: int, blocks: int, out: int, dtype: torch.dtype) -> list[Any]:
    """Codes, sub-scales among them, of any bits, of some rows as large as can be; scales that are exponents from the
    least, which is subnormal; x of one number in the first row."""
    generator = torch.Generator().manual_seed(run_seed())
    whole = math.lcm(format.group, 16) if format.codes == "int4" else 32  # INT4 has whole groups
    width = blocks * (format.words.block if format.words else whole)
    parts: dict[str, Tensor] = {}
    for name, (shape, kind) in format.storage(out, width).items():
        if kind.is_floating_point:
            parts[name] = torch.randn(shape, generator=generator).to(kind)
        elif kind == torch.uint8:
            parts[name] = torch.randint(LARGEST_EXPONENT, shape, generator=generator).to(kind)
            parts[name][::3], parts[name][1::3] = LARGEST_EXPONENT, 0
        else:
            parts[name] = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32).to(kind)
            parts[name][::3], parts[name][1::3] = -1, 0x7F7F7F7F if kind == torch.int32 else -128
    x = torch.randn(tokens, width, generator=generator) * torch.tensor((SIZES * tokens)[:tokens])[:, None]
    x[0] = 0.5
    bias = torch.randn(out, generator=generator).to(dtype) if out % 2 else None
    return [x.to(dtype), parts["weight"], parts["scales"], parts.get("minima"), bias, format.codes, format.group]


def in_panels(given: list[Any]) -> list[Any]:
    """Lay out what `operands_by_group` made as a model does."""
    x, weight, scales, minima, bias, codes, group = given
    scales, minima = (
        each if each is None else scales_to_panels(regrouped(each, group, x.shape[1])) for each in (scales, minima)
    )
    bias = None if bias is None else whole_panels(bias)
    return [x, to_panels(weight), scales, minima, bias, codes, math.gcd(group, x.shape[1])]


@needs_mlir
@settings(max_examples=tries(40))
@given(panels=st.booleans(), **SHAPES_BY_GROUP)
def test_sums_of_groups_have_the_bits_of_the_plain_form(panels: bool, **shape: Any) -> None:
    """Sums of a group are exact, and what follows is rounded alike: the bits of a row depend on neither the instruction
    nor the number of rows."""
    given = operands_by_group(**shape)
    expected, out = multiply(*given), shape["out"]
    assert expected.isfinite().all()
    with nan_filled_memory():
        stored = in_panels(given) if panels else given
        found = multiply(*stored, backend=Backend.MLIR)
        alone = multiply(given[0][-1:], *stored[1:], backend=Backend.MLIR)
    assert torch.equal(found[:, :out], expected) and torch.equal(alone[:, :out], expected[-1:])


@needs_mlir
@at_every_level
@pytest.mark.parametrize("name", ["q4_1", "q6_k", "iq4_nl"])
def test_sums_of_groups_have_these_bits_at_every_level(name: str, level: Level) -> None:
    for tokens in (2, 7):
        given = operands_by_group(BY_GROUP[name], tokens, 1, 70, torch.bfloat16)
        with limited_to(level):
            found = multiply(*given, backend=Backend.MLIR)
        assert torch.equal(found[:, :70], multiply(*given))


@given(**SHAPES_BY_GROUP)
def test_the_plain_form_is_the_product_of_x_rounded_by_blocks(
    format: MatrixFormat, tokens: int, blocks: int, out: int, dtype: torch.dtype
) -> None:
    x, weight, scales, minima, bias, codes, group = operands_by_group(format, tokens, blocks, out, dtype)
    x, scales = x.double(), scales.double()
    bias, minima = (None if each is None else each.double() for each in (bias, minima))
    found = multiply(x, weight, scales, minima, bias, codes, group)
    rounded, matrix = rounded_to_int8(x, by_row=False), dequantize_matrix(format, weight, scales, minima)
    torch.testing.assert_close(found, linear_reference(rounded, matrix, bias), rtol=1e-9, atol=1e-9)
    for start in range(0, x.shape[1], 32):
        block, exact = rounded[:, start : start + 32], x[:, start : start + 32]
        scale = (exact.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        assert ((block - exact).abs() <= scale * (0.5 + 1e-9)).all()


@pytest.mark.parametrize("backend", [Backend.EAGER, pytest.param(Backend.MLIR, marks=needs_mlir)])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("tokens", [2, 9])
def test_a_number_that_is_not_finite_spoils_its_row_alone(backend: Backend, number: float, tokens: int) -> None:
    given = operands_by_group(BY_GROUP["q4_1"], tokens, 3, 7, torch.float32)
    expected = multiply(*given)
    given[0][1, 40] = number
    found = multiply(*given, backend=backend)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, *range(2, tokens)]], expected[[0, *range(2, tokens)]])


@at_every_level
def test_formats_that_read_rows_alike_share_their_rows(level: Level) -> None:
    """Codes of 4 and of 5 bits are multiplied with the same rows: one function of a step makes them."""
    four, five = (
        FewRows("", 256, 64, kind, "f32", Target(level), w8a8=True, quant_group=32) for kind in ("i4", "q5_0")
    )
    assert int8_buffers([four, five], 1) == [four.int8_rows.named(1)] and four.int8_rows == five.int8_rows


BYTE_DOTS, INT16, WIDENED = {"vpdpbusd"}, {"vpmaddwd"}, {"vpmaddubsw", "vpmaddwd"}
BELOW_VNNI = {"int8": INT16, "q8_0": INT16, "iq4_nl": INT16, "q4_1": WIDENED, "q6_k": WIDENED}


@needs_mlir
@needs_objdump
@at_executed_levels
@pytest.mark.parametrize("tokens", [1, 4, 0])
@pytest.mark.parametrize("name", list(BELOW_VNNI))
def test_it_is_multiplied_as_the_level_does(level: Level, tokens: int, name: str) -> None:
    """Bytes where there are dot products of bytes; elsewhere pairs of int16, or of bytes that VPMADDUBSW multiplies
    without saturation."""
    format = {"int8": INT8_MATRIX, **BY_GROUP}[name]
    beside = ["f16"] * (1 + bool(format.minima)) if format.group else ["f32"]
    shape = 512, 70, mlir.weight_kind(format, torch.int8)
    kernel, _ = mlir._compiled(Target(level), tokens, False, True, *shape, "bf16", False, format.group, *beside)
    found = set(re.findall(r"vpdpbusd|vpmaddwd|vpmaddubsw|vpmulld", kernel.stages["asm"]))
    assert found == (BYTE_DOTS if Target(level).has_int8_dot else BELOW_VNNI[name])
