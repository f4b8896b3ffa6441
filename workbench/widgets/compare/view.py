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
from workbench.widgets.view import PictureWidget

LAYOUTS = ("ratios", "table", "two measures")


class Compare(PictureWidget):
    """Any number of `runs` (Records, run folders, sweeps, records that are files, each whole or `PATH:VARIANT`).

    Labels show only the settings that differ. Against `baseline` (the first unless given) stand differences and ratios
    with confidence intervals where something was repeated; `x` and `y` are the measures of the plot of two. `force`
    takes times of a busy machine too. `comparison` is the value that is drawn (`workbench.runs.Comparison`).
    """

    baseline = traitlets.Unicode()
    way = traitlets.Enum(LAYOUTS, default_value=LAYOUTS[0])
    measures = traitlets.Tuple()  # those shown; all that a comparison shows unasked, where none is named
    x = traitlets.Unicode()
    y = traitlets.Unicode()

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
        known = sorted(set.intersection(*(_known(group) for group in self.comparison.groups)))
        default_measures = list(dict.fromkeys(row.measure for row in self.comparison.rows))
        plotted = [name for name in (*default_measures, *known) if direction(name)]
        self.measures = tuple(measures)
        self.x, self.y = x or plotted[0], y or plotted[min(1, len(plotted) - 1)]
        self.observe(self._compare_again, ["baseline", "measures"])
        self.watch("way", "x", "y")
        self.show(*self._controls(known, default_measures, plotted))

    def picture(self) -> str:
        if self._problem:
            return svg.html(f'<p role="alert">{html.escape(self._problem)}</p>')
        if self.way == "table":
            return svg.html(self.comparison._repr_html_())
        if self.way == "ratios":
            return compare_picture.draw_ratios(self.comparison)
        try:
            return compare_picture.draw_pareto(self.comparison, self.x, self.y)
        except WorkbenchError as error:
            return svg.html(f'<p role="alert">{html.escape(str(error))}</p>')

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
        wide = ipywidgets.Layout(width="auto", min_width="22em")
        baseline = ipywidgets.Dropdown(options=baselines, description="baseline", layout=wide)
        way = ipywidgets.ToggleButtons(options=LAYOUTS, description="show", style={"button_width": "auto"})
        measures = ipywidgets.SelectMultiple(
            options=known, value=tuple(default_measures), description="measures", rows=5
        )
        x = ipywidgets.Dropdown(options=_with(plotted, self.x), description="across")
        y = ipywidgets.Dropdown(options=_with(plotted, self.y), description="up")
        for control, name in ((baseline, "baseline"), (way, "way"), (x, "x"), (y, "y")):
            traitlets.link((self, name), (control, "value"))
        traitlets.dlink((measures, "value"), (self, "measures"))
        both = ipywidgets.HBox([x, y])

        def fit(_: object = None) -> None:
            plot = self.way == "two measures"
            both.layout.display, measures.layout.display = ("", "none") if plot else ("none", "")

        self.observe(fit, "way")
        fit()
        return ipywidgets.HBox([baseline, way]), measures, both


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
