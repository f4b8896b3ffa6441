"""The picture of a comparison: every name, and a file that is a picture."""

from __future__ import annotations

import pytest

from workbench.measure import chart as pareto

ROWS = [
    {"variant": "float32", "bytes_per_token": 6144.0, "kl_mean": 0.0},
    {"variant": "int8", "bytes_per_token": 1700.0, "kl_mean": 1e-4},
    {"variant": "worse", "bytes_per_token": 2000.0, "kl_mean": 1e-3},
]


def test_it_is_drawn_with_every_name() -> None:
    text = pareto.chart(ROWS, "what does it cost?").svg()
    assert all(name in text for name in ("float32", "int8", "worse", "what does it cost?"))
    dots = pareto.chart(ROWS, "").spec["layer"][1]["data"]["values"]
    values = {value["tip"].partition(":")[0]: value for value in dots}
    assert [values[name]["front"] for name in ("float32", "int8", "worse")] == [True, True, False]
    assert values["float32"]["y"] == pytest.approx(1e-5)  # a logarithm has no zero: below the smallest


def test_points_that_are_one_bear_their_names_together() -> None:
    text = pareto.chart([*ROWS, {**ROWS[0], "variant": "the same"}], "").svg()
    assert "float32, the same" in text


def test_weights_are_the_size_where_caches_are_alike() -> None:
    rows = [{**row, "bytes_per_token": 512.0, "weight_bytes": row["bytes_per_token"]} for row in ROWS]
    layers = [pareto.chart(each, "").spec["layer"][1] for each in (ROWS, rows)]
    assert [[row["x"] for row in each["data"]["values"]] for each in layers] == 2 * [[6144.0, 1700.0, 2000.0]]
    assert [each["encoding"]["x"]["title"] for each in layers] == list(pareto.SIZES.values())
