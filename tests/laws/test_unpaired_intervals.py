"""Two sets that were not measured in turn are resampled apart: that they are equal is chance, and no certainty."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from workbench.runs.bootstrap import contrast


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0, 4.0), (1.0, 5.0, 9.0)])
def test_equal_sets_that_are_not_paired_have_an_interval(values: tuple[float, ...]) -> None:
    one: dict[Hashable, float] = dict(enumerate(values))
    other: dict[Hashable, float] = dict(enumerate(values, len(values)))
    found = contrast(one, other)
    assert not found.paired and found.difference == 0 and found.difference_interval is not None
    assert found.difference_interval.low <= values[0] - values[1] and found.difference_interval.high >= 1.0
