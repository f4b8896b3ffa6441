"""Compare records with a chosen baseline, or with each other by two measures."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError
from workbench.figures.figure import Figure
from workbench.reports.comparison_charts import front_figure, lines_figure, ratio_figure
from workbench.runs.compared_run import find_compared_runs
from workbench.runs.comparison import Comparison, compare
from workbench.runs.measures import direction
from workbench.widgets.compare.data import FigureTable, sweep_lines, swept_settings
from workbench.widgets.compare.export import ExportButtons
from workbench.widgets.compare.table import draw_table, draw_table_image
from workbench.widgets.view import PictureWidget

LAYOUTS = ("ratios", "table", "lines", "two measures")
BESIDE_RATIOS, BESIDE_PLOT = 300, 90  # pixels for labels next to a plot


class Compare(PictureWidget):
    """A view that compares `runs` with a baseline: Records, run folders, sweeps or record files, each whole or as
    `PATH:VARIANT`.

    Labels show only the settings that differ. Ratios to `baseline` (default: the first run) have confidence intervals
    if runs were repeated. `x` and `y` are the measures of the layout `two measures`; `swept` is the numeric setting on
    the axis of the layout `lines`. A click on a column's head sorts the table (`sort_by`, `descending`). Buttons save
    the table as CSV in full precision, and the present layout as PNG. `force` accepts times of a busy machine.
    `comparison` is the drawn `workbench.runs.Comparison`, `figures` its table.
    """

    baseline = traitlets.Unicode()
    shown_as = traitlets.Enum(LAYOUTS, default_value=LAYOUTS[0])
    measures = traitlets.Tuple()  # names of the shown measures; empty: the comparison's default
    x = traitlets.Unicode()
    y = traitlets.Unicode()
    sort_by = traitlets.Unicode()  # key of a table column; empty: order of the runs
    descending = traitlets.Bool(False)
    swept = traitlets.Unicode()  # setting on the x axis of the lines

    def __init__(
        self,
        *runs: Any,
        baseline: str | None = None,
        measures: Sequence[str] = (),
        x: str | None = None,
        y: str | None = None,
        force: bool = False,
    ):
        if not runs:
            raise WorkbenchError("Compare: give two runs or more, a sweep's folder, or a run of variants")
        super().__init__()
        self._names = [item_name for run in runs for item_name in _named(run)]
        self._force, self._problem = force, ""
        self.baseline = _chosen(baseline, self._names)
        self.comparison = self._compared(measures)
        first, *others = (_known(group) for group in self.comparison.groups)
        known = sorted(first & set.union(*others))  # measures of the first run and at least one other
        default_measures = list(dict.fromkeys(row.measure for row in self.comparison.rows))
        plotted = [name for name in (*default_measures, *known) if direction(name)]
        self.measures = tuple(measures)
        self.x, self.y = x or plotted[0], y or plotted[min(1, len(plotted) - 1)]
        self._swept = swept_settings(self.comparison.groups)
        self.swept = self._swept[0] if self._swept else ""
        self.observe(self._compare_again, ["baseline", "measures"])
        self.watch("shown_as", "x", "y", "sort_by", "descending", "swept")
        self.shown.on_pick(self._pick)
        self.show(*self._controls(known, default_measures, plotted), below=(self._export,))

    def picture(self) -> str:
        if self._problem:
            return svg.html(f'<p role="alert">{html.escape(self._problem)}</p>')
        if self.shown_as == "table":
            return draw_table(self.figures, self.sort_by, self.descending, self.comparison.table().note)
        try:
            return svg.html(self.figure().svg(in_page=True))
        except WorkbenchError as error:
            return svg.html(f'<p role="alert">{html.escape(str(error))}</p>')

    @property
    def figures(self) -> FigureTable:
        """Return the table of the compared runs, sorted by `sort_by`."""
        return FigureTable.from_comparison(self.comparison).sorted(self.sort_by, self.descending)

    def csv(self) -> str:
        """Return the table as CSV: full precision, units in the headings, empty cells for missing figures."""
        return self.figures.csv()

    def figure(self) -> Figure:
        """Return the shown chart. Raises WorkbenchError if the table is shown, or if there is nothing to draw."""
        if self._problem:
            raise WorkbenchError(self._problem)
        if self.shown_as == "ratios":
            return ratio_figure(self.comparison, width=self.width - BESIDE_RATIOS)
        if self.shown_as == "two measures":
            return front_figure(self.comparison, self.x, self.y, self.width - BESIDE_PLOT)
        if self.shown_as == "table":
            raise WorkbenchError("a table is no chart; show ratios, lines or two measures")
        if not self.swept:
            raise WorkbenchError("no numeric setting differs between these runs: there is nothing to draw lines over")
        measures = dict.fromkeys(row.measure for row in self.comparison.rows)
        lines = {name: sweep_lines(self.comparison.groups, self.swept, name) for name in measures}
        return lines_figure(lines, self.swept, self.width)

    def _image(self) -> str:
        return draw_table_image(self.figures) if self.shown_as == "table" else self.figure().svg()

    def _pick(self, key: str) -> None:
        """Sort by the picked column: first ascending, then descending, then in the order of the runs."""
        if key.startswith("sort:"):
            column = key.removeprefix("sort:")
            if self.sort_by != column:
                self.sort_by, self.descending = column, False
            elif self.descending:
                self.sort_by, self.descending = "", False
            else:
                self.descending = True

    def _compared(self, measures: Sequence[str]) -> Comparison:
        return compare(self._names, self.baseline, tuple(measures), force=self._force)

    def _compare_again(self, _: object) -> None:
        try:
            self.comparison, self._problem = self._compared(self.measures), ""
        except WorkbenchError as error:
            self._problem = str(error)
        self.throttle.mark()

    def _controls(
        self, known: Sequence[str], default_measures: Sequence[str], plotted: Sequence[str]
    ) -> tuple[ipywidgets.Widget, ...]:
        short = [Path(name).name for name in self._names]
        baselines = [(s if short.count(s) == 1 else name, name) for s, name in zip(short, self._names, strict=True)]
        wide = {"width": "auto", "min_width": "22em"}
        baseline = ipywidgets.Dropdown(options=baselines, description="baseline", layout=wide)
        shown_as = ipywidgets.ToggleButtons(options=LAYOUTS, description="show", style={"button_width": "auto"})
        measures = ipywidgets.SelectMultiple(
            options=known, value=tuple(default_measures), description="measures", rows=5
        )
        x = ipywidgets.Dropdown(options=_with(plotted, self.x), description="across")
        y = ipywidgets.Dropdown(options=_with(plotted, self.y), description="up")
        traitlets.dlink((measures, "value"), (self, "measures"))
        swept = ipywidgets.Dropdown(options=self._swept or [""], description="over", layout=wide)
        self._export = ExportButtons("comparison", csv=self.csv, png=self._image)
        both = ipywidgets.HBox([self.linked("x", x), self.linked("y", y)])

        def fit(_: object = None) -> None:
            plot = self.shown_as == "two measures"
            both.layout.display, measures.layout.display = ("", "none") if plot else ("none", "")
            swept.layout.display = "" if self.shown_as == "lines" else "none"

        self.observe(fit, "shown_as")
        fit()
        first = ipywidgets.HBox([self.linked("baseline", baseline), self.linked("shown_as", shown_as)])
        return first, measures, both, self.linked("swept", swept)


def _named(run: Any) -> list[str]:
    """Return the single runs and variants of `run` as `PATH` or `PATH:VARIANT`, for `compare`."""
    path = str(getattr(run, "path", run))
    return [f"{item.path}:{item.variant}" if item.variant else item.path for item in find_compared_runs(path)]


def _chosen(baseline: str | None, names: Sequence[str]) -> str:
    """Return the one of `names` that equals `baseline` or ends with it; the first for None.

    Raises:
        WorkbenchError: no name matches, or several do.
    """
    if baseline is None:
        return names[0]
    found = [name for name in names if name == baseline or name.endswith((f"/{baseline}", f":{baseline}"))]
    if len(found) != 1:
        raise WorkbenchError(f"baseline {baseline!r}: matches {len(found)} runs; choose one of {', '.join(names)}")
    return found[0]


def _known(group: Any) -> set[str]:
    return set.intersection(*(
        {*item.figures, *(name for figures in item.rounds.values() for name in figures)} for item in group.runs
    ))  # fmt: skip


def _with(names: Sequence[str], chosen: str) -> list[str]:
    return list(dict.fromkeys([*names, chosen]))
