"""Matrices in words: where a code's bits stand, and nothing lost either way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels.linear.matrix_format import WORDS, MatrixFormat, WordLayout
from compiled_kernels.linear.planes import pack_planes, pack_sub_scales, unpack_planes, unpack_sub_scales
from compiled_kernels.linear.quantize import dequantize_matrix, quantize_matrix
from tests.thorough import tries

SEEDS = st.integers(0, 2**31)
NAMES = st.sampled_from(list(WORDS))


def drawn(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_columns_of_a_word_stand_where_the_layout_says(bits: int) -> None:
    """Column 4 r + o at bits b r + 8 (0, 2, 1, 3)[o]."""
    for column in range(32 // bits):
        codes = torch.zeros(32 // bits, dtype=torch.int32)
        codes[column] = (1 << bits) - 1
        word = int(pack_planes(codes, (bits,))) & 0xFFFFFFFF
        assert word == codes[column] << bits * (column // 4) + 8 * (0, 2, 1, 3)[column % 4]


@settings(max_examples=tries(30))
@given(SEEDS, NAMES, st.integers(1, 3))
def test_words_hold_every_code_and_sub_scale(seed: int, name: str, blocks: int) -> None:
    words = WORDS[name]
    codes = drawn(seed, 1 << words.bits, 2, blocks, words.block)
    packed = pack_planes(codes, words.planes)
    assert packed.shape[-1] == words.plane_words
    assert torch.equal(unpack_planes(packed, words.planes).int(), codes)
    if (sub := words.sub_scales) is not None:
        groups = words.block // words.group
        scales, minima = (drawn(seed + i, 1 << sum(bits for bits, _ in sub.scale), 2, groups) for i in (1, 2))
        held = pack_sub_scales(scales, minima if words.minima else None, sub)
        assert held.shape[-1] == sub.words and torch.equal(unpack_sub_scales(held, sub.scale, groups), scales)
        assert not words.minima or torch.equal(unpack_sub_scales(held, sub.minimum, groups), minima)


@settings(max_examples=tries(30))
@given(SEEDS, NAMES, st.integers(1, 3), st.integers(1, 2), st.sampled_from([1e-3, 1.0, 50.0]))
def test_a_matrix_stays_within_half_a_step(seed: int, name: str, out: int, blocks: int, size: float) -> None:
    """Half a step of a code, wider in a table; and what scales lose in float16, and in a second level's integers."""
    format, words = MatrixFormat.named(name), WORDS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, blocks * words.block, generator=generator) * size + size / 3
    stored = quantize_matrix(weight, format)
    for tensor, (shape, dtype) in zip(stored, format.storage(*weight.shape).values(), strict=True):
        assert tensor.shape == shape and tensor.dtype == dtype
    grouped = weight.view(out, -1, words.group)
    reach = torch.stack([grouped.abs().amax(-1), grouped.amax(-1) - grouped.amin(-1).clamp(max=0)]).amax(0)
    reach = reach.view(out, blocks, -1)
    steps = (1 << words.bits) - 1 if words.minima else (1 << words.bits - 1) - 1
    lost = 2**-10 + (0 if words.sub_scales is None else 1 / words.sub_scales.largest)
    values = torch.tensor(words.values or range(steps + 1)).sort().values
    gaps = values.diff().max().item() / values[-1].item()
    half = gaps / 2 * (2 if words.exponents else 1.02)  # a power of two is up to twice the scale that is wanted
    step = reach * half + lost * reach.amax(-1, keepdim=True)
    away = (dequantize_matrix(format, *stored) - weight).abs().view(out, blocks, -1, words.group)
    assert (away <= 1.01 * step[..., None]).all()


def test_what_no_product_loads_is_refused() -> None:
    with pytest.raises(ValueError, match="q4_k: needs groups of 32 with minima"):
        MatrixFormat("q4_k", 32, torch.float16)
    with pytest.raises(ValueError, match="int4 by 12: groups of INT4 must be a multiple of 8 columns"):
        MatrixFormat("int4", 12, torch.float16)
    for make in (MatrixFormat, MatrixFormat.named):
        with pytest.raises(ValueError, match="is called 'q9'; known: .*q6_k"):
            make("q9")
    assert MatrixFormat.named("q6_k").problem(640) == "blocks of 256 (q6_k) do not divide"
    with pytest.raises(ValueError, match="blocks of 32"):
        quantize_matrix(torch.ones(1, 40), MatrixFormat.named("q8_0"))
    refused = {
        ((4, 2, 1), 32, ()): "more than 6 bits must be bytes with an offset and a sign bit",
        ((8,), 32, ()): "more than 6 bits must be bytes with an offset and a sign bit",
        ((2,), 32, (-9, -1, 3, 11)): "a table of values must have 16 values and one plane",
        ((2, 1, 1), 32, ()): "must have one or two planes",
        ((4, 1), 16, ()): "each of whole words",
    }
    for (planes, block, values), problem in refused.items():
        with pytest.raises(ValueError, match=problem):
            WordLayout(planes, block, values=values)
