"""The picture of a comparison: the points none beats, and a file that is a picture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.measure import chart as pareto

POINTS = st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), min_size=1, max_size=12)


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


@given(POINTS)
def test_the_frontier_is_what_none_beats(points: list[tuple[float, float]]) -> None:
    best = set(pareto.pareto_frontier(points))
    for index, point in enumerate(points):
        assert (index in best) == (not any(beats(other, point) for other in points))


ROWS = [
    {"variant": "float32", "bytes_per_token": 6144.0, "kl_mean": 0.0},
    {"variant": "int8", "bytes_per_token": 1700.0, "kl_mean": 1e-4},
    {"variant": "worse", "bytes_per_token": 2000.0, "kl_mean": 1e-3},
]


@pytest.mark.skipif(pareto.plotting_problem() is not None, reason="pip install 'inference-workbench[plots]'")
def test_it_is_drawn_with_every_name() -> None:
    text = pareto.render_chart(pareto.chart(ROWS, "what does it cost?"), "svg").decode()
    assert text.startswith("<svg") and all(name in text for name in ("float32", "int8", "worse", "what does it cost?"))
    assert pareto.render_chart(pareto.chart(ROWS, "what does it cost?"), "png").startswith(b"\x89PNG")
    dots = pareto.chart(ROWS, "").to_dict()["layer"][1]["data"]["values"]
    values = {value["variant"]: value for value in dots}
    assert [values[name]["best"] for name in ("float32", "int8", "worse")] == [True, True, False]
    assert values["float32"]["kl"] == pytest.approx(1e-5)  # a logarithm has no zero: below the smallest


@pytest.mark.skipif(pareto.plotting_problem() is not None, reason="pip install 'inference-workbench[plots]'")
def test_points_that_are_one_bear_their_names_together() -> None:
    text = pareto.render_chart(pareto.chart([*ROWS, {**ROWS[0], "variant": "the same"}], ""), "svg").decode()
    assert "float32, the same" in text


@pytest.mark.skipif(pareto.plotting_problem() is not None, reason="pip install 'inference-workbench[plots]'")
def test_weights_are_the_size_where_caches_are_alike() -> None:
    rows = [{**row, "bytes_per_token": 512.0, "weight_bytes": row["bytes_per_token"]} for row in ROWS]
    layers = [pareto.chart(each, "").to_dict()["layer"][1] for each in (ROWS, rows)]
    assert layers[0]["data"] == layers[1]["data"]
    assert [each["encoding"]["x"]["title"] for each in layers] == list(pareto.SIZES.values())
