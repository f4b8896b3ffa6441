"""The building blocks of codecs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from workbench.kv_cache.codes import affine_codes, affine_numbers, nearest_levels, pack_bits, project, unpack_bits

SEEDS = st.integers(0, 2**31)


@given(SEEDS, st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_packed_codes_come_back(seed: int, bits: int, count: int) -> None:
    each = 8 // bits
    codes = torch.randint(2**bits, (3, 2, count * each), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    stored = pack_bits(codes, bits)
    assert stored.shape == (3, 2, count) and stored.dtype == torch.uint8
    assert torch.equal(unpack_bits(stored, bits), codes)


def test_codes_that_do_not_fill_bytes_are_refused() -> None:
    refuses("3 codes of 4 bits do not fill whole bytes of 2", lambda: pack_bits(torch.zeros(3), 4))
    refuses("1, 2, 4 or 8 bits, not 3", lambda: unpack_bits(torch.zeros(3, dtype=torch.uint8), 3))


@given(SEEDS, st.sampled_from([2, 4, 8]), st.integers(-3, 3), st.sampled_from([-1, 0, 1]))
def test_a_code_is_within_half_a_step_of_its_number(seed: int, bits: int, power: int, dim: int) -> None:
    numbers = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(seed)).double() * 10.0**power
    codes, scales, minima = affine_codes(numbers, bits, dim)
    assert int(codes.max()) < 2**bits and scales.shape[dim] == minima.shape[dim] == 1
    away = (affine_numbers(codes, scales, minima) - numbers).abs()
    rounding = numbers.abs().amax() * 2.0**-9 + 2.0**-24 * 2**bits  # of scale and minimum to float16
    assert bool((away <= scales.double() / 2 + rounding).all())


def test_constant_and_huge_numbers() -> None:
    for value in (0.0, 2.5, 1e9, -1e9):
        codes, scales, minima = affine_codes(torch.full((2, 8), value), 4)
        assert torch.equal(affine_numbers(codes, scales, minima), torch.full((2, 8), value).clamp(-65504, 65504))


@given(SEEDS, st.integers(2, 16))
def test_the_nearest_level(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    levels, numbers = torch.randn(count, generator=generator).sort().values, torch.randn(4, 9, generator=generator)
    found = (numbers - levels[nearest_levels(numbers, levels).long()]).abs()
    torch.testing.assert_close(found, (numbers[..., None] - levels).abs().amin(-1))


@given(SEEDS, st.integers(1, 9))
def test_a_projected_row_is_the_same_alone(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, matrix = torch.randn(count, 3, 16, generator=generator), torch.randn(16, 5, generator=generator)
    together = project(rows, matrix)
    torch.testing.assert_close(together, rows @ matrix)
    assert all(torch.equal(project(rows[i : i + 1], matrix)[0], together[i]) for i in range(count))
