"""Draws come from the seed and the position alone, follow softmax, and never take a removed token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.kernels import on_threads
from workbench.sampling.samplers import (
    Greedy,
    RandomSampler,
    most_probable,
    sample_categorical,
    sample_categorical_parallel,
    uniform,
)
from workbench.testing.samplers import logits_rows

SEEDS = st.integers(0, 2**63 - 1)
ALMOST_ONE = 1 - 2.0**-53
WRITTEN = [0.12311943861730146, 0.5826717794384204, 0.5363207289114678]


@given(SEEDS, st.integers(0, 2**40))
def test_uniform_is_a_function_into_the_unit_interval(seed, position):
    number = uniform(seed, position)
    assert 0 <= number < 1
    assert number == uniform(seed, position)
    assert (number * 2**53).is_integer()


def test_uniform_is_written_down():
    """These numbers are part of every record: a change would make old runs irreproducible."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == WRITTEN


def test_uniform_is_even_over_positions_and_over_seeds():
    for numbers in ([uniform(7, n) for n in range(20_000)], [uniform(n, 7) for n in range(20_000)]):
        counts = torch.histc(torch.tensor(numbers, dtype=torch.float64), bins=50, min=0, max=1)
        assert chi_square(counts, torch.full((50,), 400.0)) < limit(49)
        lagged = torch.tensor(numbers, dtype=torch.float64) - 0.5
        assert abs(float((lagged[1:] * lagged[:-1]).mean())) < 5 / 12 / math.sqrt(20_000)


@given(logits_rows(64), st.lists(st.floats(0, ALMOST_ONE), min_size=1, max_size=5))
def test_a_draw_inverts_the_distribution_function(row, numbers):
    batch = row.logits.expand(len(numbers) + 2, -1)
    reached = row.logits.double().softmax(-1).cumsum(-1)
    numbers = [0.0, ALMOST_ONE, *numbers]
    for number, token in zip(numbers, RandomSampler().choose_rows(batch, numbers), strict=True):
        assert float(row.logits[token]) > -math.inf
        assert float(reached[token]) >= number * float(reached[-1]) - 1e-12
        assert token == 0 or float(reached[token - 1]) <= number * float(reached[-1]) + 1e-12
        assert RandomSampler().choose(row.logits, number) == (token, None)


def test_a_draw_on_the_edge_takes_the_token_that_begins_there():
    logits = torch.tensor([-math.inf, 0.0, 0.0, -math.inf, 0.0, 0.0])
    assert RandomSampler().choose_rows(logits.expand(4, -1), [0.0, 0.25, 0.5, 0.75]) == [1, 2, 4, 5]


@given(logits_rows(64))
def test_a_sum_that_is_not_monotonic_never_draws_a_removed_token(row):
    """A GPU adds in parallel, so its running sum may rise a little over tokens that add nothing."""
    exact, noise = torch.Tensor.cumsum, 1e-3 * torch.tensor([0.0, 1.0, -1.0, 2.0] * 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cumsum", lambda self, dim: exact(self, dim) + noise)
        numbers = [n / 200 for n in range(200)] + [ALMOST_ONE]
        tokens = sample_categorical_parallel(row.logits.double().softmax(-1).expand(len(numbers), -1), numbers)
    assert bool((row.logits[tokens] > -math.inf).all())


@given(logits_rows(64), st.lists(st.floats(0, ALMOST_ONE), min_size=1, max_size=5), st.sampled_from([1.0, 0.3, 1e-300]))
def test_a_draw_is_the_same_added_up_either_way(row, numbers, share):
    weights = (row.logits.double().softmax(-1) * share).expand(len(numbers), -1)
    assert sample_categorical(weights, numbers) == sample_categorical_parallel(weights, numbers)
    nothing = torch.zeros(2, 5, dtype=torch.float64)
    assert sample_categorical(nothing, [0.0, 0.5]) == sample_categorical_parallel(nothing, [0.0, 0.5]) == [0, 0]


@given(logits_rows(64), st.integers(2, 6))
def test_greedy_takes_the_lowest_of_equal_tokens(row, count):
    best = (row.logits == row.logits.max()).nonzero()[0].item()
    assert Greedy().choose_rows(row.logits.expand(count, -1), [0.9] * count) == [best] * count
    assert Greedy().choose(row.logits, 0.9) == (best, None)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def limit(freedom: int) -> float:
    """The 1 - 1e-6 quantile of chi-square, by Wilson and Hilferty."""
    return freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 7), (1, 200_003), (3, 49_152), (17, 4_096)])
def test_sums_of_weights_are_those_of_a_loop_on_any_threads(shape: tuple[int, int], threads: int) -> None:
    """Sampled tokens rest on it: sums in another order would be other tokens, and rise where nothing was added."""
    weights = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).mul(6).softmax(-1)
    weights[:, ::3] = 0
    with on_threads(threads):
        assert np.array_equal(weights.cumsum(-1).numpy(), np.add.accumulate(weights.numpy(), axis=-1))


LOGPROBS = st.lists(st.integers(-8, 0).map(float) | st.just(-torch.inf), min_size=1, max_size=12)


@given(LOGPROBS, st.integers(0, 14))
def test_the_most_probable_are_in_order_and_of_equal_ones_the_first(values: list[float], count: int) -> None:
    wanted = sorted((-value, token) for token, value in enumerate(values) if value > -torch.inf)[:count]
    found = most_probable(torch.tensor(values, dtype=torch.float64), count)
    assert [(-value, token) for token, value in found] == wanted
