"""Compare records with a chosen baseline, or by any two of their measures."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError
from workbench.runs.compared_run import find_compared_runs
from workbench.runs.comparison import Comparison, compare
from workbench.runs.measures import direction
from workbench.widgets.compare import picture as compare_picture
from workbench.widgets.compare.data import FigureTable, sweep_lines, swept_settings
from workbench.widgets.compare.export import ExportButtons
from workbench.widgets.compare.lines import draw_lines
from workbench.widgets.compare.table import draw_table, draw_table_image
from workbench.widgets.view import PictureWidget

LAYOUTS = ("ratios", "table", "lines", "two measures")


class Compare(PictureWidget):
    """Any number of `runs` (Records, run folders, sweeps, records that are files, each whole or `PATH:VARIANT`).

    Labels show only the settings that differ. Against `baseline` (the first unless given) stand differences and ratios
    with confidence intervals where something was repeated; `x` and `y` are the measures of the plot of two. A click on
    a column's head sorts the table by it (`sort_by`, `descending`); `lines` are over `swept`, a numeric setting.
    Buttons save the table as CSV in full precision, and what is shown as PNG. `force` takes times of a busy machine
    too. `comparison` is the value that is drawn (`workbench.runs.Comparison`), `figures` its table.
    """

    baseline = traitlets.Unicode()
    shown_as = traitlets.Enum(LAYOUTS, default_value=LAYOUTS[0])
    measures = traitlets.Tuple()  # those shown; all that a comparison shows unasked, where none is named
    x = traitlets.Unicode()
    y = traitlets.Unicode()
    sort_by = traitlets.Unicode()  # the key of a column of the table; empty: in the order of the runs
    descending = traitlets.Bool(False)
    swept = traitlets.Unicode()  # the setting below the lines

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
        known = sorted(first & set.union(*others))  # what a run may be compared by, where others lack it too
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
            return self._drawing()
        except WorkbenchError as error:
            return svg.html(f'<p role="alert">{html.escape(str(error))}</p>')

    @property
    def figures(self) -> FigureTable:
        """The table of the compared runs, as it is sorted."""
        return FigureTable.from_comparison(self.comparison).sorted(self.sort_by, self.descending)

    def csv(self) -> str:
        """Return the table as CSV: full precision, units in the head, an empty cell for a missing figure."""
        return self.figures.csv()

    def _drawing(self) -> str:
        """Draw the present layout as SVG. Raises WorkbenchError where it cannot be drawn."""
        if self._problem:
            raise WorkbenchError(self._problem)
        if self.shown_as == "table":
            return draw_table_image(self.figures)
        if self.shown_as == "ratios":
            return compare_picture.draw_ratios(self.comparison, width=self.width)
        if self.shown_as == "two measures":
            return compare_picture.draw_pareto(self.comparison, self.x, self.y, self.width)
        if not self.swept:
            raise WorkbenchError("no numeric setting differs between these runs: there is nothing to draw lines over")
        measures = dict.fromkeys(row.measure for row in self.comparison.rows)
        lines = {name: sweep_lines(self.comparison.groups, self.swept, name) for name in measures}
        return draw_lines(lines, self.swept, self.width)

    def _pick(self, key: str) -> None:
        """Sort by a column whose head was picked: rising, then falling, then in the order of the runs."""
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
        for control, name in ((baseline, "baseline"), (shown_as, "shown_as"), (x, "x"), (y, "y")):
            traitlets.link((self, name), (control, "value"))
        traitlets.dlink((measures, "value"), (self, "measures"))
        swept = ipywidgets.Dropdown(options=self._swept or [""], description="over", layout=wide)
        traitlets.link((self, "swept"), (swept, "value"))
        self._export = ExportButtons("comparison", csv=self.csv, png=self._drawing)
        both = ipywidgets.HBox([x, y])

        def fit(_: object = None) -> None:
            plot = self.shown_as == "two measures"
            both.layout.display, measures.layout.display = ("", "none") if plot else ("none", "")
            swept.layout.display = "" if self.shown_as == "lines" else "none"

        self.observe(fit, "shown_as")
        fit()
        return ipywidgets.HBox([baseline, shown_as]), measures, both, swept


def _named(run: Any) -> list[str]:
    """`run` as paths of single runs and variants, as `compare` takes them."""
    path = str(getattr(run, "path", run))
    return [f"{item.path}:{item.variant}" if item.variant else item.path for item in find_compared_runs(path)]


def _chosen(baseline: str | None, names: Sequence[str]) -> str:
    """The one of `names` that `baseline` is, or ends; the first where nothing is asked."""
    if baseline is None:
        return names[0]
    found = [name for name in names if name == baseline or name.endswith((f"/{baseline}", f":{baseline}"))]
    if len(found) != 1:
        raise WorkbenchError(f"baseline {baseline!r}: is {len(found)} of these runs; choose one of {', '.join(names)}")
    return found[0]


def _known(group: Any) -> set[str]:
    return set.intersection(*(
        {*item.figures, *(name for figures in item.rounds.values() for name in figures)} for item in group.runs
    ))  # fmt: skip


def _with(names: Sequence[str], chosen: str) -> list[str]:
    return list(dict.fromkeys([*names, chosen]))
