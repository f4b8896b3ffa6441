"""The picture of a comparison: the points none beats, and a file that is a picture."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.study import labels, pareto

POINTS = st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), min_size=1, max_size=12)


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


@given(POINTS)
def test_the_frontier_is_what_none_beats(points: list[tuple[float, float]]) -> None:
    best = set(pareto.frontier(points))
    for index, point in enumerate(points):
        assert (index in best) == (not any(beats(other, point) for other in points))


ROWS = [
    {"variant": "float32", "bytes_per_token": 6144.0, "kl_mean": 0.0},
    {"variant": "int8", "bytes_per_token": 1700.0, "kl_mean": 1e-4},
    {"variant": "worse", "bytes_per_token": 2000.0, "kl_mean": 1e-3},
]


@pytest.mark.skipif(pareto.plotting_problem() is not None, reason="pip install 'inference-workbench[plots]'")
def test_it_is_drawn_with_every_name() -> None:
    text = pareto.svg(ROWS, "what does it cost?")
    assert text.startswith("<svg") and all(name in text for name in ("float32", "int8", "worse", "what does it cost?"))
    assert pareto.png(ROWS, "what does it cost?").startswith(b"\x89PNG")
    values = {value["variant"]: value for value in pareto.chart(ROWS, "").to_dict()["data"]["values"]}
    assert [values[name]["best"] for name in ("float32", "int8", "worse")] == [True, True, False]
    assert values["float32"]["kl"] == pytest.approx(1e-5)  # a logarithm has no zero: a decade below the smallest
    drawn = re.findall(r">([^<>]+)</text>", text)
    assert "2,000" in drawn and "8,000" not in drawn  # ticks far enough apart to be read


@pytest.mark.skipif(pareto.plotting_problem() is not None, reason="pip install 'inference-workbench[plots]'")
def test_a_name_stands_where_its_place_was_reckoned_to_be() -> None:
    """Labels are placed in pixels; what is drawn agrees."""
    text = pareto.svg(ROWS, "")
    x, y = map(float, re.findall(r"translate\(([\d.]+),([\d.]+)\)[^>]*>int8<", text)[0])
    left, right = 0.85 * 1700, 1.3 * 6144
    assert x == pytest.approx(560 * math.log(1700 / left) / math.log(right / left) + labels.DOT + 3, abs=1.5)
    assert y == pytest.approx(340 * 2 / 3 - 8, abs=5)  # decades 1e-2 to 1e-5; its baseline lies below its middle


PIXELS = st.lists(st.tuples(st.integers(0, 560), st.integers(0, 340)), min_size=1, max_size=7)


@given(PIXELS)
def test_every_name_is_placed_once_and_those_of_one_point_together(points: list[tuple[int, int]]) -> None:
    names = [f"variant {i}" for i in range(len(points))]
    placed = labels.labels(names, points, 560, 340)
    assert sorted(", ".join(label.text for label in placed).split(", ")) == names
    assert len(placed) == len(set(points))


@pytest.mark.parametrize(
    ("names", "points"),
    [
        (["int8 keys, int4 values", "fp8"], [(110, 78), (157, 74)]),
        (["window 64", "window 64, 4 sinks"], [(30, 34), (65, 34)]),
        (["1 group, mean", "1 group, first"], [(50, 50), (50, 54)]),
        (["at the edge", "under the top"], [(540, 330), (300, 2)]),
    ],
)
def test_names_near_each_other_can_be_read(names: list[str], points: list[tuple[int, int]]) -> None:
    """Those that once stood on each other, and those that would be cut off."""
    boxes = [label.box for label in labels.labels(names, points, 560, 340)]
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert left >= 0 and top >= 0 and right <= 560 and bottom <= 340
        for other in boxes[:i]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
