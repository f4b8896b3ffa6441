"""Runs side by side: what is drawn is what `workbench.runs.compare` says."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.runs.comparison import Comparison, ComparisonRow
from workbench.widgets import Compare
from workbench.widgets.compare.picture import draw_pareto, draw_ratios

SVG = "{http://www.w3.org/2000/svg}"
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


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{SVG}text")]


def test_labels_are_the_settings_that_differ_and_seeds_repeat(files: list[Path]) -> None:
    view = Compare(*files, measures=["bytes_per_token", "seconds"])
    words = texts(view.picture())
    assert "against cache.format=dense" in words and "cache.format=int4" in words
    assert not [word for word in words if "seed" in word]
    for row in view.comparison.rows:
        assert any(word.startswith(f"{row.ratio:.3f}") for word in words) and row.repetitions == 5
    # The table and the pictures are of one value.
    view.shown_as = "table"
    assert f"{view.comparison.rows[0].ratio:.3f}" in view.picture()


def test_intervals_are_read_without_a_pointer(files: list[Path]) -> None:
    view = Compare(*files, measures=["seconds"])
    words = texts(view.picture())
    for row in view.comparison.rows:
        assert any(f"{row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]" in word for word in words)
    for picture in (view.picture(), draw_pareto(view.comparison, "bytes_per_token", "kl_mean")):
        marks = [e for e in ET.fromstring(picture).iter() if "data-tip" in e.attrib and e.tag != f"{SVG}text"]
        assert len({mark.attrib["data-key"] for mark in marks}) == len(marks) >= 3
        assert [mark.attrib["tabindex"] for mark in marks] == ["0", *["-1"] * (len(marks) - 1)]


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
    controls = {w.description: w for w in _below(view) if getattr(w, "description", "")}
    controls["measures"].value = ("kl_mean",)
    assert {row.measure for row in view.comparison.rows} == {"kl_mean"}
    controls["show"].value = "two measures"
    controls["across"].value, controls["up"].value = "bytes_per_token", "kl_mean"
    view.throttle.flush()
    assert {"bytes_per_token (less is better)", "kl_mean (less is better)"} <= set(texts(view.shown.content))
    assert view.x == "bytes_per_token" and controls["baseline"].value == view.baseline


def test_those_that_none_beats_are_filled(files: list[Path]) -> None:
    view = Compare(*files)
    picture = draw_pareto(view.comparison, "bytes_per_token", "kl_mean")
    circles = list(ET.fromstring(picture).iter(f"{SVG}circle"))
    filled = {c.attrib["data-tip"].split("\n")[0] for c in circles if c.attrib["class"] == "c2"}
    assert filled == {"cache.format=dense", "cache.format=int8", "cache.format=int4"} and len(circles) == 4


def test_runs_that_cannot_be_compared_are_reported(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="give two runs or more"):
        Compare()
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


def _below(widget: Any) -> list[Any]:
    return [w for child in getattr(widget, "children", ()) for w in (child, *_below(child))]
