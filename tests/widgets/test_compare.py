"""Runs side by side: what is drawn is what `workbench.runs.compare` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.widgets import controls
from tests.widgets.compared import record
from workbench.errors import WorkbenchError
from workbench.measure.chart import axis_title
from workbench.widgets import Compare

FORMATS = {"dense": (6144, 0.0, 1.0), "int8": (1968, 7e-5, 1.1), "int4": (1344, 9e-4, 1.3), "worst": (7000, 1e-2, 0.9)}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = []
    for form, (size, apart, seconds) in FORMATS.items():
        for seed in range(5):
            figures = {"bytes_per_token": size, "kl_mean": apart, "seconds": seconds + seed / 100}
            settings = {"cache": {"format": form}, "sampling": {"seed": seed}}
            found.append(record(tmp_path, f"run-{form}-{seed}", figures, **settings))
    return found


def test_labels_are_the_settings_that_differ_and_seeds_repeat(files: list[Path]) -> None:
    view = Compare(*files, measures=["bytes_per_token", "seconds"])
    rows = view.comparison.rows
    assert [bool(row.ratio_low) for row in rows if row.measure == "seconds"] == [True] * 3
    assert {row.label for row in rows} == {f"cache.format={form}" for form in ("int8", "int4", "worst")}
    assert {row.repetitions for row in rows} == {5} and "seed" not in view.picture()


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
    assert f"{axis_title('bytes_per_token')} (less is better)" in view.shown.content
    assert (view.x, view.y) == ("bytes_per_token", "kl_mean") and control["baseline"].value == view.baseline


def test_runs_that_cannot_be_compared_are_reported(files: list[Path]) -> None:
    with pytest.raises(WorkbenchError, match="choose one of"):
        Compare(*files, baseline="unknown")
    view = Compare(*files)
    for measures, begins in ((("no_such",), False), ((), True)):
        view.measures = measures
        view.throttle.flush()
        assert ("<svg" in view.shown.content) == begins
        assert begins or 'role="alert"' in view.shown.content and "no_such" in view.shown.content
