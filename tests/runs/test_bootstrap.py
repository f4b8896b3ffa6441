"""Intervals that hold what they say they hold."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.thorough import tries
from workbench.runs import bootstrap
from workbench.runs.bootstrap import contrast, student_t_quantile

TRIALS = 300
figures = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


def samples(values: list[float], of: str = "") -> dict:
    return {(of, index): value for index, value in enumerate(values)}


@given(st.integers(2, 200), st.floats(0.5, 0.999))
def test_few_repetitions_widen_an_interval(n: int, confidence: float) -> None:
    """Resampling n values finds a spread that is (n - 1) / n of what n - 1 degrees of freedom have; this is undone."""
    with_t = NormalDist().cdf(-student_t_quantile((1 + confidence) / 2, n - 1))
    assert bootstrap.tail_probability(confidence, n, n - 1) < with_t < (1 - confidence) / 2


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("n", [3, 5, 10])
def test_an_interval_covers_as_often_as_it_says(n: int, paired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of normal data the true difference lies inside at the stated rate, or more often where nothing is paired."""
    monkeypatch.setattr(bootstrap, "NUM_RESAMPLES", 500)
    draw, held, confidence = np.random.default_rng(n), 0, 0.0
    for _ in range(TRIALS):
        drift = draw.normal(0, 5, n) if paired else 0.0  # which pairs take out
        first, second = (draw.normal(10, 1, n) + drift).tolist(), (draw.normal(12, 1, n) + drift).tolist()
        found = contrast(samples(first), samples(second, "" if paired else "other"))
        assert found.paired is paired and found.difference_interval is not None
        held += found.difference_interval.low <= 2 <= found.difference_interval.high
        confidence = found.confidence or 0.0
    wide = 3 * math.sqrt(confidence * (1 - confidence) / TRIALS)
    assert confidence == min(0.95, 1 - 2.0 ** (1 - n))
    assert held / TRIALS > confidence - wide
    assert not paired or held / TRIALS < confidence + wide + 0.02


@settings(max_examples=tries(60), deadline=None)
@given(values=figures)
def test_a_run_against_itself_is_one(values: list[float]) -> None:
    found = contrast(samples(values), samples(values))
    assert found.difference == 0 and found.ratio == 1
    for interval, point in ((found.difference_interval, 0), (found.ratio_interval, 1)):
        assert (interval is None) == (len(values) == 1)
        assert interval is None or interval.low == interval.high == point
    apart = contrast(samples(values), samples(values, "again"))
    assert apart.ratio == 1 and not apart.paired
    assert apart.ratio_interval is None or apart.ratio_interval.low <= 1 <= apart.ratio_interval.high


@settings(max_examples=tries(80), deadline=None)
@given(first=figures, second=figures, paired=st.booleans())
def test_exchanging_the_two_inverts(first: list[float], second: list[float], paired: bool) -> None:
    assume(not paired or len(first) == len(second))
    one, other = samples(first), samples(second, "" if paired else "other")
    there, back = contrast(one, other), contrast(other, one)
    assert there.difference == -back.difference
    assert there.ratio is not None and back.ratio is not None and there.ratio * back.ratio == pytest.approx(1)
    if there.ratio_interval and back.ratio_interval and there.difference_interval and back.difference_interval:
        assert there.ratio_interval.low * back.ratio_interval.high == pytest.approx(1)
        assert there.ratio_interval.high * back.ratio_interval.low == pytest.approx(1)
        assert there.difference_interval.low == pytest.approx(-back.difference_interval.high)


@settings(max_examples=tries(40), deadline=None)
@given(values=figures, factor=st.floats(0.1, 10))
def test_a_factor_is_the_ratio_whatever_the_spread(values: list[float], factor: float) -> None:
    """Pairs take out all that a pair has in common."""
    found = contrast(samples(values), samples([factor * value for value in values]))
    assert found.ratio == pytest.approx(factor)
    if found.ratio_interval:
        assert found.ratio_interval.low == pytest.approx(factor) == found.ratio_interval.high


def test_what_is_not_above_zero_has_no_ratio() -> None:
    found = contrast(samples([0.0, 1.0]), samples([1.0, 2.0]))
    assert found.ratio is None and found.ratio_interval is None and found.difference == 1
    for values in ([0.0, 1.0], [-1.0, 1.0]):
        assert contrast(samples([1.0, 2.0]), samples(values)).ratio is None


def test_the_same_numbers_give_the_same_interval() -> None:
    one, other = samples([1.0, 2.0, 4.0, 7.0]), samples([2.0, 2.5, 5.0], "other")
    assert contrast(one, other) == contrast(one, other)


@pytest.mark.parametrize(
    ("p", "degrees", "wanted"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.95, 5, 2.0150), (0.975, 10, 2.2281), (0.995, 30, 2.7500)],
)
def test_quantiles_of_student_are_those_of_the_tables(p: float, degrees: int, wanted: float) -> None:
    assert student_t_quantile(p, degrees) == pytest.approx(wanted, abs=5e-5)
