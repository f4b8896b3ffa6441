"""Compared runs as a table and as lines: sorting is a stable permutation, a file has the numbers, what is missing says
so."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.widgets import SVG
from workbench.runs.compared_run import ComparedRun
from workbench.runs.comparison import Comparison, RepeatedRuns
from workbench.runs.measures import DEFAULT_MEASURES, unit
from workbench.widgets import Compare
from workbench.widgets.compare.data import (
    FigureColumn,
    FigureRow,
    FigureTable,
    sweep_lines,
    swept_settings,
)
from workbench.widgets.compare.lines import draw_lines
from workbench.widgets.compare.table import draw_table

FIGURES = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 1.0, 1.5])
COLUMNS = (FigureColumn("ttft_s_p50"), FigureColumn("ttft_s_p50", True), FigureColumn("kv_bytes_peak"))
LABELS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)


@st.composite
def tables(draw: st.DrawFn) -> FigureTable:
    rows = draw(st.lists(st.tuples(LABELS, st.tuples(*[FIGURES] * len(COLUMNS))), min_size=1, max_size=8))
    made = (FigureRow(f"{n} {label}", figures, is_baseline=n == 0) for n, (label, figures) in enumerate(rows))
    return FigureTable("base", COLUMNS, tuple(made))


@given(tables(), st.integers(0, len(COLUMNS)), st.booleans())
def test_sorting_is_a_stable_permutation_with_missing_figures_last(
    table: FigureTable, place: int, descending: bool
) -> None:
    key = table.keys()[place]
    found = table.sorted(key, descending)
    assert sorted(map(id, found.rows)) == sorted(map(id, table.rows))
    values = [row.label if place == 0 else row.figures[place - 1] for row in found.rows]
    there: list[Any] = [value for value in values if value is not None]
    assert values[len(there) :] == [None] * (len(values) - len(there))
    assert there == sorted(there, reverse=descending)
    order = [table.rows.index(row) for row in found.rows]
    for before, after, one, other in zip(order, order[1:], values, values[1:], strict=False):
        assert one != other or before < after, "equal rows changed places"
    assert found.sorted(key, descending) == found and table.sorted("no such column") is table


@given(tables())
def test_a_saved_table_has_the_numbers_and_its_head_their_units(table: FigureTable) -> None:
    head, *rows = csv.reader(io.StringIO(table.csv()))
    assert head == ["setting", "ttft_s_p50 [s]", "ttft_s_p50 ratio", "kv_bytes_peak [bytes]"]
    for row, cells in zip(table.rows, rows, strict=True):
        assert cells[0] == row.label
        assert tuple(float(cell) if cell else None for cell in cells[1:]) == row.figures


@given(tables(), st.sampled_from(["", "kv_bytes_peak"]), st.booleans())
def test_every_figure_is_drawn_and_a_missing_one_says_so(table: FigureTable, sort_by: str, descending: bool) -> None:
    root = ET.fromstring(draw_table(table, sort_by, descending))
    cells = [[cell.text or "" for cell in row.iter("td")] for row in root.iter("tr")][1:]
    drawn = table.sorted(sort_by, descending).rows
    for row, each in zip(drawn, cells, strict=True):
        assert [cell == "missing" for cell in each] == [value is None for value in row.figures]


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["dense", "int8"]), FIGURES), min_size=1, max_size=12))
def test_lines_have_every_known_figure_once_by_rising_setting(found: list[tuple[int, str, float | None]]) -> None:
    groups = [
        group({"schedule.max_num_seqs": n, "cache.format": form, "sampling.seed": at}, {} if y is None else {"m_s": y})
        for at, (n, form, y) in enumerate(found)
    ]
    lines = sweep_lines(groups, "schedule.max_num_seqs", "m_s")
    drawn = sorted((x, y) for line in lines for x, y in line.points)
    assert drawn == sorted((float(n), y) for n, _, y in found if y is not None)
    for line in lines:
        assert list(line.points) == sorted(line.points) and "seed" not in line.label
    formats = {form for _, form, y in found if y is not None}
    assert len(lines) == len(formats)
    root = ET.fromstring(draw_lines({"m_s": lines}, "schedule.max_num_seqs", 300))
    assert len(list(root.iter(f"{SVG}circle"))) == len(drawn)


def test_a_swept_setting_is_a_number_that_differs() -> None:
    groups = [group({"a": n % 2, "b": n, "c": "x", "d": 5, "e": n % 2 == 0, "sampling.seed": n}, {}) for n in range(4)]
    assert swept_settings(groups) == ("b", "a")


def test_units_are_those_that_names_say() -> None:
    some = {"ttft_s_p50": "s", "output_tokens_per_s": "tokens/s", "kv_bytes_peak": "bytes", "kl_mean": "nats"}
    assert {name: unit(name) for name in some} == some
    assert [name for name in DEFAULT_MEASURES if not unit(name)] == [] and unit("no_such") == ""


def test_a_head_sorts_rising_falling_and_not_at_all(tmp_path: Path) -> None:
    view = Compare(*sweep(tmp_path), measures=["seconds", "peak_bytes"])
    view.shown_as = "table"
    given_order = [row.label for row in view.figures.rows]
    seen = []
    for _ in range(3):
        view.shown.picked = "sort:seconds"
        view.throttle.flush()
        seen.append((view.sort_by, view.descending, [row.figures[0] for row in view.figures.rows]))
        assert view.shown.picked == ""
    rising = sorted(value for value in seen[0][2] if value is not None)
    assert seen[0] == ("seconds", False, rising) and seen[1] == ("seconds", True, rising[::-1])
    assert seen[2][0] == "" and [row.label for row in view.figures.rows] == given_order
    assert view.figures.rows[0].is_baseline and view.figures.rows[0].figures[1] == 1


def test_buttons_make_files_of_what_is_shown(tmp_path: Path) -> None:
    view = Compare(*sweep(tmp_path), measures=["seconds"])
    sent = view._export.file
    for way in ("ratios", "table", "lines", "two measures"):
        view.shown_as = way
        content = sent("png")["content"]
        ET.fromstring(content)
        assert (content == view.picture()) == (way != "table")
    assert sent("csv") == {"kind": "csv", "name": "comparison.csv", "content": view.csv()}
    assert view.csv().splitlines()[0].startswith("setting,seconds [s],seconds ratio")
    view.measures = ("no_such",)
    assert "no_such" in sent("png")["problem"]


def test_lines_without_a_swept_setting_say_so(tmp_path: Path) -> None:
    view = Compare(*(record(tmp_path, form, 1, form, 1.0) for form in ("dense", "int8")), measures=["seconds"])
    view.shown_as = "lines"
    view.throttle.flush()
    assert 'role="alert"' in view.shown.content and "no numeric setting" in view.shown.content


def test_runs_without_a_figure_stand_last(tmp_path: Path) -> None:
    view = Compare(*sweep(tmp_path), measures=["seconds", "peak_bytes"])
    view.shown_as, view.sort_by = "table", "peak_bytes"
    for view.descending in (False, True):
        assert view.figures.rows[-1].figures[2:] == (None, None)
        view.throttle.flush()
        assert view.picture().count(">missing<") == 2


def group(settings: dict[str, Any], figures: dict[str, float]) -> RepeatedRuns:
    run = ComparedRun("run", None, settings, {}, figures, None, "/nowhere")
    return RepeatedRuns(str(settings), (run,))


def record(place: Path, name: str, seqs: int, form: str, seconds: float, size: float | None = 4096.0) -> Path:
    value = {
        "summary": {"seconds": seconds, **({} if size is None else {"peak_bytes": size})},
        "environment": {"date": "2026-11-21T12:00:00+00:00", "cpu": {"model": "A CPU", "usable_cores": 2}, "gpu": []},
        "experiment": {"question": "?", "cache": {"format": form}, "schedule": {"max_num_seqs": seqs}},
    }
    file = place / f"{name}.json"
    file.write_text(json.dumps(value))
    return file


def sweep(place: Path) -> list[Path]:
    """Two formats at three sizes; one run lacks a figure."""
    return [
        record(place, f"{form}-{n}", n, form, (2.0 if form == "dense" else 3.0) / n, None if n == 4 and form == "int8"
               else 1000.0 * n)
        for form in ("dense", "int8") for n in (1, 2, 4)
    ]  # fmt: skip


def test_the_table_of_a_comparison_has_its_ratios(tmp_path: Path) -> None:
    view = Compare(*sweep(tmp_path), measures=["seconds"])
    assert isinstance(view.comparison, Comparison)
    ratios = {row.label: row.figures[1] for row in view.figures.rows if not row.is_baseline}
    assert ratios == {row.label: row.ratio for row in view.comparison.rows}
