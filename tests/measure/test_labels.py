"""Names in a picture: none covers another or a dot, as long as there is room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workbench.figures.labels import DOT, Label, _box, place_labels
from workbench.svg import Box, boxes_overlap

POINTS = st.lists(
    st.tuples(st.integers(120, 400).map(float), st.integers(0, 300).map(float)), min_size=1, max_size=4, unique=True
)


@given(POINTS)
def test_no_name_covers_another_or_a_dot(points: list[tuple[float, float]]) -> None:
    names = [f"variant {index}" for index in range(len(points))]
    labels = place_labels(points, names, 560)
    boxes = [_box(x, y, name, label) for (x, y), name, label in zip(points, names, labels, strict=True)]
    dots: list[Box] = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in points]
    for index, box in enumerate(boxes):
        assert not any(boxes_overlap(box, other) for other in boxes[:index] + dots)


def test_a_name_alone_stands_above_and_right_of_its_dot_and_one_at_the_edge_left_of_it() -> None:
    assert place_labels([(100.0, 100.0)], ["int8"], 560) == [Label(7, -6)]
    assert place_labels([(559.0, 100.0)], ["a longer name"], 560)[0].left


def test_a_name_covers_no_line_of_the_picture() -> None:
    rising: list[Box] = [(100.0 + step, 100.0 - step, 101.0 + step, 101.0 - step) for step in range(-60, 60)]
    label = place_labels([(100.0, 100.0)], ["int8"], 560, rising)[0]
    assert not any(boxes_overlap(_box(100.0, 100.0, "int8", label), box) for box in rising)
