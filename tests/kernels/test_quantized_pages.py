"""Codes of keys and values: exact packing, half a step, stated rules for what no code can say, and sizes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.agreement import disagreement
from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.cases import case_of, suite_of
from compiled_kernels.quantized_attention import (
    PageFormat,
    QuantizationRule,
    QuantizedKV,
    QuantizedTensor,
    bits_per_number,
    dequantize,
    hadamard_rotate,
    quantize,
    quantized_attention,
    storage_shapes,
)
from compiled_kernels.quantized_attention.quantize import (
    INTEGER_BITS,
    SCALED_FORMATS,
    codes_per_word,
    decode_e4m3,
    pack_codes,
    unpack_codes,
)
from tests.helpers.kernels import needs_mlir
from tests.thorough import tries
from tools.lint.tree import ROOT, pages

INTEGERS, KINDS = st.sampled_from(list(INTEGER_BITS)), st.sampled_from(SCALED_FORMATS)
seeds = st.integers(0, 2**31)


@given(INTEGERS, st.integers(1, 3), st.integers(1, 5), seeds)
def test_packing_is_exact(kind, words: int, kept: int, seed: int) -> None:
    codes = torch.randint(0, 2 ** INTEGER_BITS[kind], (2, words * codes_per_word(kind), kept), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(seed))  # fmt: skip
    stored = pack_codes(codes, kind)
    assert stored.shape == (2, words, kept, 4)
    assert torch.equal(unpack_codes(stored, kind), codes)


@st.composite
def runs(draw: st.DrawFn) -> Tensor:
    """Numbers [summed, kept] of every size that float16 holds, some runs constant, some far from zero."""
    generator = torch.Generator().manual_seed(draw(seeds))
    spread = draw(st.sampled_from([0.0, 1e-9, 1e-4, 0.3, 20.0, 3e4]))
    middle = draw(st.sampled_from([0.0, 0.1, -7.3, 1000.0, -3e4, 6e4]))
    numbers = middle + spread * torch.randn(32, 16, generator=generator)
    numbers[draw(st.integers(0, 31)), draw(st.integers(0, 15))] = draw(st.sampled_from([0.0, 65504.0, -65504.0, 1e-30]))
    return numbers.clamp(-65504, 65504).to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))


@settings(max_examples=tries(300))
@given(runs(), KINDS, st.sampled_from([4, 16]))
def test_a_number_is_within_half_a_step(numbers: Tensor, kind, run: int) -> None:
    """e4m3 has 3 bits after the leading one, and steps of 2^-9 below 2^-6."""
    packed = quantize(numbers, kind, run)
    exact = numbers.double().clamp(-65504, 65504)  # as bfloat16 the largest number of float16 is 65536
    assert packed.kind == kind and packed.scales is not None
    steps = packed.scales.double().repeat_interleave(run, dim=0).T  # [summed, kept]
    half = torch.maximum(exact.abs() / 16, steps * 2**-10) if kind == "fp8" else steps / 2
    assert ((dequantize(packed, torch.float64) - exact).abs() <= half * (1 + 2e-4)).all()


@given(st.floats(-65504, 65504, width=16), KINDS)
def test_a_constant_that_float16_holds_is_exact(value: float, kind) -> None:
    numbers = torch.full((32, 4), value)
    found = dequantize(quantize(numbers, kind, 4))
    if kind == "fp8":
        assert bool(((found - numbers).abs() <= abs(value) / 1000 + 1e-4).all())
    else:
        assert torch.equal(found, numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_e4m3_is_read_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    exact = codes.view(torch.float8_e4m3fn).to(dtype)
    sound = ~exact.isnan()
    assert sound.sum() == 254, "all but the two NaNs"
    assert torch.equal(decode_e4m3(codes, dtype)[sound], exact[sound])
    assert torch.equal(decode_e4m3(codes, dtype)[sound].signbit(), exact[sound].signbit())


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_run_with_what_is_no_number_reads_as_nan(kind, wrong: float) -> None:
    numbers = torch.randn(8, 8)
    numbers[3, 5] = wrong
    found = dequantize(quantize(numbers, kind, 4))
    assert found[3, 4:].isnan().all() and found.isnan().sum() == 4


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_float16_cannot_hold_becomes_its_largest(kind) -> None:
    numbers = torch.tensor([[1e30, -1e30, 0.0, 70000.0]]).repeat(8, 1)
    clamped = quantize(numbers.clamp(-65504, 65504), kind, 4)
    assert torch.equal(dequantize(quantize(numbers, kind, 4)), dequantize(clamped))


@pytest.mark.parametrize(("kind", "bar"), [("int8", 0.55), ("int4", 0.29)])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_pages_are_as_small_as_they_must_be(kind, bar: float, dim: int) -> None:
    """At groups of 64, scales and minima included, beside bfloat16; counted from the tensors."""
    columns = 64 if dim % 64 == 0 else dim
    for keys in (True, False):
        format = PageFormat(kind, keys, 3, dim, 64, 64 if keys else columns)
        pages = format.empty(5, torch.bfloat16)
        dense = 5 * 3 * 64 * dim * 2
        assert pages.nbytes <= bar * dense
        assert pages.nbytes * 8 == 5 * 3 * 64 * dim * bits_per_number(kind, format.numbers_per_scale, torch.bfloat16)


def test_what_does_not_fit_words_and_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="int4: 12 x 16 numbers are not multiples of 8 x 16"):
        storage_shapes("int4", (1,), 12, 16, 16)
    with pytest.raises(ValueError, match="are not multiples"):
        storage_shapes("int8", (1,), 8, 12, 8)


def test_dense_pages_are_the_numbers() -> None:
    numbers = torch.randn(2, 8, 4)
    packed = quantize(numbers, "dense", 4)
    assert packed.kind == "dense" and torch.equal(dequantize(packed), numbers) and packed == QuantizedTensor(numbers)


@given(st.sampled_from([1, 2, 16, 64]), seeds)
def test_a_rotation_keeps_products_and_undoes_itself(dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(3, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    assert torch.allclose(hadamard_rotate(hadamard_rotate(q)), q, atol=1e-12)
    assert torch.allclose(hadamard_rotate(q) @ hadamard_rotate(k).T, q @ k.T, atol=1e-12)
    assert hadamard_rotate(q.bfloat16()).dtype == torch.bfloat16


def test_a_rotation_spreads_an_outlier() -> None:
    spike = torch.zeros(64)
    spike[7] = 8.0
    assert torch.equal(hadamard_rotate(spike).abs(), torch.ones(64))


@pytest.mark.parametrize("dim", [3, 48, 96])
def test_other_widths_are_not_rotated(dim: int) -> None:
    with pytest.raises(ValueError, match=f"a power of two, not {dim}"):
        hadamard_rotate(torch.zeros(2, dim))


@needs_mlir
@pytest.mark.parametrize("shape", ["decode 3 ragged", "mixed"])
def test_a_format_of_codes_is_the_line_that_the_guide_shows(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ((kind, bits),) = re.findall(r'`INTEGER_BITS` \| `"(\w+)": (\d)', pages(ROOT)["docs/guide/cache_formats.md"])
    monkeypatch.setitem(INTEGER_BITS, kind, int(bits))
    suite = suite_of("quantized_attention")
    case = case_of(suite, f"{shape} int4 float32")
    case = replace(case, arguments={**case.arguments, "formats": (kind, kind), "run": 32, "size": 32})
    inputs = suite.make_inputs(case)
    assert inputs[1].keys.kind == kind
    assert disagreement(suite, case, inputs, Backend.MLIR) is None


@needs_mlir
@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 60.0])
def test_the_mlir_backend_reads_every_e4m3_number(scale: float) -> None:
    """Each of the 254 is a column of the values; all tokens are alike, so that any weights give it back."""
    codes = torch.arange(256).to(torch.uint8).view(4, 64)
    codes[codes % 128 == 127] = 0  # NaN
    keys, values = (PageFormat("fp8", side, 4, 64, 8, 8).empty(2, torch.float32) for side in (True, False))
    values.codes[1] = codes[:, None, :, None].expand(4, 2, 64, 4)
    assert values.scales is not None and keys.scales is not None
    values.scales.fill_(scale)
    recent = torch.full((2, 2, 4, 8, 64), torch.nan)
    table, one = torch.ones(1, 2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    recent[:, 1, :, 0] = codes.view(torch.float8_e4m3fn).float() * scale
    table[0, 1] = 1  # the ninth token's recent page: its first place
    lengths = torch.tensor([9], dtype=torch.int32)
    kv = QuantizedKV(keys, values, recent[0], recent[1], table, table, QuantizationRule(8, 1))
    given_ = kv, Spans(one, lengths, True), AttentionParameters(1.0)
    found = quantized_attention(torch.zeros(1, 4, 64), *given_, Backend.MLIR)
    torch.testing.assert_close(found[0], recent[1, 1, :, 0], rtol=1e-6, atol=0)
