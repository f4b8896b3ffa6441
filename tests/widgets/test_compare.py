"""Runs side by side: what is drawn is what `workbench.runs.compare` says."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.widgets import SVG, controls, words
from workbench.errors import WorkbenchError
from workbench.runs.comparison import Comparison, ComparisonRow
from workbench.widgets import Compare
from workbench.widgets.compare.picture import draw_pareto, draw_ratios

FORMATS = {"dense": (6144, 0.0, 1.0), "int8": (1968, 7e-5, 1.1), "int4": (1344, 9e-4, 1.3), "worst": (7000, 1e-2, 0.9)}


def record(place: Path, name: str, format: str, seed: int = 0) -> Path:
    size, apart, seconds = FORMATS[format]
    value = {
        "summary": {"bytes_per_token": size, "kl_mean": apart, "seconds": seconds + seed / 100},
        "environment": {"date": "2026-11-21T12:00:00+00:00", "cpu": {"model": "A CPU", "usable_cores": 2}, "gpu": []},
        "experiment": {"question": "?", "cache": {"format": format}, "sampling": {"seed": seed}},
    }
    file = place / f"{name}.json"
    file.write_text(json.dumps(value))
    return file


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [record(tmp_path, f"run-{format}-{seed}", format, seed) for format in FORMATS for seed in range(5)]


def test_labels_are_the_settings_that_differ_and_seeds_repeat(files: list[Path]) -> None:
    view = Compare(*files, measures=["bytes_per_token", "seconds"])
    assert [bool(row.ratio_low) for row in view.comparison.rows if row.measure == "seconds"] == [True] * 3
    labels = [row.label for row in view.comparison.rows]
    assert "cache.format=int4" in labels and not [label for label in labels if "seed" in label]
    for shown_as in ("ratios", "table"):
        view.shown_as = shown_as
        text = words(view.picture())
        assert "cache.format=dense" in text and "seed" not in text
        for row in view.comparison.rows:
            interval = f" [{row.ratio_low:.3f}, {row.ratio_high:.3f}]" if shown_as == "ratios" and row.ratio_low else ""
            assert row.label in text and f"{row.ratio:.3f}{interval}" in text and row.repetitions == 5


def test_another_baseline_is_compared_anew(files: list[Path]) -> None:
    view = Compare(*files, measures=["bytes_per_token"])
    before = {row.label: row.ratio for row in view.comparison.rows}["cache.format=int8"]
    view.baseline = str(next(file for file in files if "int8" in file.name))
    after = {row.label: row.ratio for row in view.comparison.rows}["cache.format=dense"]
    assert before is not None and after is not None and before * after == pytest.approx(1)
    view.throttle.flush()
    assert "against cache.format=int8" in view.shown.content


def test_controls_and_traits_are_one(files: list[Path]) -> None:
    view = Compare(*files)
    control = controls(view)
    control["measures"].value = ("kl_mean",)
    assert {row.measure for row in view.comparison.rows} == {"kl_mean"}
    control["show"].value = "two measures"
    control["across"].value, control["up"].value = "bytes_per_token", "kl_mean"
    view.throttle.flush()
    assert "bytes_per_token (less is better)" in view.shown.content
    assert (view.x, view.y) == ("bytes_per_token", "kl_mean") and control["baseline"].value == view.baseline


def test_those_that_none_beats_are_filled(files: list[Path]) -> None:
    view = Compare(*files)
    picture = draw_pareto(view.comparison, "bytes_per_token", "kl_mean")
    circles = list(ET.fromstring(picture).iter(f"{SVG}circle"))
    filled = {c.attrib["data-tip"].split("\n")[0] for c in circles if c.attrib["class"] == "c2"}
    assert filled == {"cache.format=dense", "cache.format=int8", "cache.format=int4"} and len(circles) == 4


def test_runs_that_cannot_be_compared_are_reported(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="choose one of"):
        Compare(*files, baseline="unknown")
    view = Compare(*files)
    view.measures = ("no_such",)
    view.throttle.flush()
    assert 'role="alert"' in view.shown.content and "no_such" in view.shown.content
    view.measures = ()
    view.throttle.flush()
    assert view.shown.content.startswith("<svg")


PLACES = st.one_of(st.none(), st.floats(1e-6, 1e6))


@given(st.lists(st.tuples(PLACES, st.sampled_from([None, "better", "worse", "same"])), min_size=1, max_size=8))
def test_every_row_has_its_mark_in_its_place(found: list[tuple[float | None, Any]]) -> None:
    rows = tuple(
        ComparisonRow("seconds", f"run <{n}>", 1.0, 1.0, 0.0, None, None, ratio, None, None, 0.95, 5, 5, True, verdict)
        for n, (ratio, verdict) in enumerate(found)
    )
    root = ET.fromstring(draw_ratios(Comparison("base & line", (), rows)))
    marks = [e for e in root.iter() if "data-tip" in e.attrib and e.tag != f"{SVG}text"]
    drawn = [(r, v) for r, v in found if r is not None]
    assert len(marks) == len(drawn)
    shapes = {"better": "polygon", "worse": "polygon", "same": "rect", None: "circle"}
    assert [m.tag.removeprefix(SVG) for m in marks] == [shapes[v] for _, v in drawn]
    (one, *_) = [float(e.attrib["x1"]) for e in root.iter(f"{SVG}line") if "stroke-dasharray" in e.attrib] or [0.0]
    for mark, (ratio, verdict) in zip(marks, drawn, strict=True):
        if verdict is None:  # right of the baseline's line where more, left where less
            assert (float(mark.attrib["cx"]) - one) * (ratio - 1) >= -1e-6 * ratio
