"""Chosen rows for laws that compile: a covering array, boundaries first, the same in every run.

    @rows(dict(heads=[(4, 2), (1, 1)], page_size=[3, 16], length=[15, 16, 17]), dict(length=16, page_size=16))
    def test_decode_equals_float64(heads, page_size, length): ...

Every pair of values of two axes stands in some row (Cohen et al., "The AETG System", 1997). What one run compiled the
next finds in the cache. `make test-thorough` adds rows that it draws by the run's random seed; a row that failed once
is added by hand to those that come first.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.thorough import THOROUGH, run_seed

Row = dict[str, Any]


def rows(
    axes: Mapping[str, Sequence[Any]], *first: Row, drawn: int = 12, valid: Callable[..., bool] = lambda **row: True
) -> pytest.MarkDecorator:
    """Return the mark that gives a test its rows.

    Args:
        axes: the values of each of the test's arguments.
        first: rows that are always tried, boundaries and what failed once; an axis it leaves out has its first value.
        drawn: rows that `make test-thorough` adds.
        valid: whether a row makes sense, by its values; none that does not is tried.
    """
    chosen = [{name: row.get(name, values[0]) for name, values in axes.items()} for row in first]
    chosen += covering(axes, chosen, valid)
    if THOROUGH:
        draw = random.Random(run_seed())
        more = ({name: draw.choice(values) for name, values in axes.items()} for _ in range(20 * drawn))
        chosen += itertools.islice((row for row in more if valid(**row)), drawn)
    values, ids = [tuple(row.values()) for row in chosen], [_id(row) for row in chosen]
    return pytest.mark.parametrize(tuple(axes), values, ids=ids)


def covering(
    axes: Mapping[str, Sequence[Any]], chosen: Sequence[Row] = (), valid: Callable[..., bool] = lambda **row: True
) -> list[Row]:
    """Return rows that, beside those `chosen`, hold every pair of values of two axes that some valid row can hold."""
    places = {name: range(len(values)) for name, values in axes.items()}
    done = {pair for row in chosen for pair in _pairs({name: _place(axes[name], row[name]) for name in axes})}
    left = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(sorted(places), 2)
        for a, b in itertools.product(places[one], places[two])
    } - done
    if len(axes) == 1:
        (name,) = axes
        return [{name: value} for value in axes[name] if all(row[name] is not value for row in chosen)]
    draw = random.Random(0)  # the same rows in every run
    found: list[Row] = []
    while left:
        wanted = min(left)
        best: dict[str, int] | None = None
        for attempt in range(60):  # every third row is drawn, as the greedy ones may all be invalid
            row = _filled(dict(wanted), places, left if attempt % 3 else set(), draw)
            value = {name: axes[name][place] for name, place in row.items()}
            if valid(**value) and (best is None or len(left & _pairs(row)) > len(left & _pairs(best))):
                best = row
        if best is None:  # no valid row has this pair
            left.discard(wanted)
            continue
        left -= _pairs(best)
        found.append({name: axes[name][best[name]] for name in axes})
    return found


def _filled(
    row: dict[str, int], places: Mapping[str, range], left: set[Any], draw: random.Random
) -> dict[str, int]:
    """Give the other axes, in drawn order, each the value that meets most pairs still left; ties are drawn."""
    for name in draw.sample([name for name in places if name not in row], len(places) - len(row)):
        gains = [(len(left & _pairs({**row, name: place})), draw.random(), place) for place in places[name]]
        row[name] = max(gains)[2]
    return row


def _pairs(row: Mapping[str, int]) -> set[Any]:
    order = sorted(row)
    return {((one, row[one]), (two, row[two])) for one, two in itertools.combinations(order, 2)}


def _place(values: Sequence[Any], value: Any) -> int:
    return next((place for place, each in enumerate(values) if each is value or each == value), -1)


def _id(row: Row) -> str:
    return "-".join(str(value).replace("torch.", "") for value in row.values())
