"""Compared runs as a table and as lines: sorting is a stable permutation, a file has the numbers, what is missing says
so."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.widgets.canned import is_golden
from tests.widgets.compared import record
from workbench.runs.compared_run import ComparedRun
from workbench.runs.comparison import Comparison, RepeatedRuns
from workbench.widgets import Compare
from workbench.widgets.compare.data import (
    FigureColumn,
    FigureRow,
    FigureTable,
    sweep_lines,
    swept_settings,
)
from workbench.widgets.compare.table import draw_table, draw_table_image

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
        assert list(line.points) == sorted(line.points) and "seed" not in line.name
    formats = {form for _, form, y in found if y is not None}
    assert len(lines) == len(formats)


def test_a_swept_setting_is_a_number_that_differs() -> None:
    groups = [group({"a": n % 2, "b": n, "c": "x", "d": 5, "e": n % 2 == 0, "sampling.seed": n}, {}) for n in range(4)]
    assert swept_settings(groups) == ("b", "a")


def test_a_head_sorts_rising_falling_and_not_at_all(tmp_path: Path) -> None:
    view = Compare(*sweep(tmp_path), measures=["seconds", "peak_bytes"])
    view.shown_as = "table"
    given_order, seen = [row.label for row in view.figures.rows], []
    for _ in range(3):
        view.shown.picked = "sort:seconds"
        view.throttle.flush()
        seen.append((view.sort_by, view.descending, [row.figures[0] for row in view.figures.rows]))
        assert view.shown.picked == ""
    rising = sorted(value for value in seen[0][2] if value is not None)
    assert seen[:2] == [("seconds", False, rising), ("seconds", True, rising[::-1])]
    assert seen[2][0] == "" and [row.label for row in view.figures.rows] == given_order
    base, *others = view.figures.rows
    assert isinstance(view.comparison, Comparison) and base.is_baseline and base.figures[1] == 1
    ratios = {row.label: row.ratio for row in view.comparison.rows if row.measure == "seconds"}
    assert {row.label: row.figures[1] for row in others} == ratios


def test_buttons_make_files_of_what_is_shown(tmp_path: Path) -> None:
    view = Compare(*sweep(tmp_path), measures=["seconds", "peak_bytes"])
    sent = view._export.file
    for way in ("ratios", "table", "lines", "two measures"):
        view.shown_as = way
        content = sent("png")["content"]
        ET.fromstring(content)
        assert is_golden("compare-table", view.picture()) if way == "table" else content == view.figure().svg()
    assert sent("csv") == {"kind": "csv", "name": "comparison.csv", "content": view.csv()}
    assert view.csv().splitlines()[0].startswith("setting,seconds [s],seconds ratio,")
    view.measures = ("no_such",)
    assert "no_such" in sent("png")["problem"]
    alone = Compare(*(record(tmp_path, form, {"seconds": 1.0}, cache={"format": form}) for form in ("dense", "int8")))
    alone.shown_as = "lines"
    alone.throttle.flush()
    assert 'role="alert"' in alone.shown.content and "no numeric setting" in alone.shown.content


def group(settings: dict[str, Any], figures: dict[str, float]) -> RepeatedRuns:
    run = ComparedRun("run", None, settings, {}, figures, None, "/nowhere")
    return RepeatedRuns(str(settings), (run,))


def sweep(place: Path) -> list[Path]:
    """Two formats at three sizes; one run lacks a figure."""
    found = []
    for form, seconds in (("dense", 2.0), ("int8", 3.0)):
        for n in (1, 2, 4):
            figures = {"seconds": seconds / n} | ({} if (n, form) == (4, "int8") else {"peak_bytes": 1000.0 * n})
            settings = {"cache": {"format": form}, "schedule": {"max_num_seqs": n}}
            found.append(record(place, f"{form}-{n}", figures, **settings))
    return found


def test_names_in_a_table_are_text() -> None:
    column = FigureColumn('<i>"')
    table = FigureTable("<b>", (column,), (FigureRow("<u>", (1.0,), is_baseline=True),))
    for drawn in (draw_table(table, column.key, note="<s>"), draw_table_image(table)):
        tags = {each.tag for each in ET.fromstring(drawn).iter()}
        assert not tags & {"i", "b", "u", "s"} and "&lt;u" in drawn and "&lt;b" in drawn
