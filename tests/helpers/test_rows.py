"""A covering array has every pair that a valid row can hold, in few rows, the same in every run."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.rows import covering, rows
from tests.thorough import THOROUGH, tries

sizes = st.lists(st.integers(1, 4), min_size=2, max_size=5)


def valid(**row: int) -> bool:
    """No row has the second value of the first two axes at once."""
    return not (row["a"] == 1 and row["b"] == 1)


@settings(max_examples=tries(100), deadline=None)
@given(sizes)
def test_every_pair_that_is_valid_stands_in_a_row(sizes: list[int]) -> None:
    axes: dict[str, Any] = dict(zip("abcde", map(range, sizes), strict=False))
    found = covering(axes, valid=valid)
    assert found == covering(axes, valid=valid) and all(valid(**row) for row in found)
    for one, two in itertools.combinations(axes, 2):
        pairs = {(row[one], row[two]) for row in found}
        wanted = set(itertools.product(axes[one], axes[two]))
        assert pairs == (wanted - {(1, 1)} if (one, two) == ("a", "b") else wanted)
    largest = sorted(sizes)[-2:]
    assert len(found) <= 2 * largest[0] * largest[1] + 2


def test_rows_begin_with_boundaries_and_are_named() -> None:
    mark = rows({"heads": [(4, 2), (1, 1)], "length": [3, 16]}, {"length": 16}, drawn=1)
    names, values = mark.args
    assert names == ("heads", "length") and values[0] == ((4, 2), 16)
    assert set(values) == set(itertools.product([(4, 2), (1, 1)], [3, 16]))
    assert len(values) == 4 + THOROUGH and mark.kwargs["ids"][0] == "(4, 2)-16"
