"""Arrange compared runs as a sortable table of figures, and as lines over a swept setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from workbench.display import Table
from workbench.figures.lines import Series
from workbench.runs.compared_run import SEED
from workbench.runs.comparison import Comparison, ComparisonRow, RepeatedRuns
from workbench.runs.measures import unit

SETTING = "setting"  # the key of the column of labels


@dataclass(frozen=True)
class FigureColumn:
    """One column of the table: a measure in its `unit`, or with `ratio` the measure's ratio to the baseline's value."""

    measure: str
    ratio: bool = False

    @property
    def key(self) -> str:
        return f"{self.measure} ratio" if self.ratio else self.measure

    @property
    def unit(self) -> str:
        return "" if self.ratio else unit(self.measure)

    @property
    def heading(self) -> str:
        """Return the column's key with its unit, as in `ttft_s_p50 [s]`."""
        return f"{self.key} [{self.unit}]" if self.unit else self.key


@dataclass(frozen=True)
class FigureRow:
    """One row of the table: a variant's label, and a figure for each column, None if missing."""

    label: str
    figures: tuple[float | None, ...]
    compared: tuple[ComparisonRow | None, ...] = ()  # for each column; None for the baseline
    is_baseline: bool = False


@dataclass(frozen=True)
class FigureTable:
    """The table of variants by measures, the baseline first; each measure has a column of values, followed by one of
    ratios."""

    baseline: str
    columns: tuple[FigureColumn, ...]
    rows: tuple[FigureRow, ...]

    @classmethod
    def from_comparison(cls, comparison: Comparison) -> FigureTable:
        measures = tuple(dict.fromkeys(row.measure for row in comparison.rows))
        found = {(row.label, row.measure): row for row in comparison.rows}
        rows = []
        for group in comparison.groups:
            is_baseline = group is comparison.groups[0]
            figures: list[float | None] = []
            compared = [found.get((group.label, measure)) for measure in measures]
            for measure, row in zip(measures, compared, strict=True):
                value = known(group.value(measure))
                ratio = (1.0 if value else None) if is_baseline else known(row.ratio if row else None)
                figures += [value, ratio]
            pairs = tuple(row for row in compared for _ in range(2))
            rows.append(FigureRow(group.label, tuple(figures), pairs, is_baseline))
        columns = tuple(FigureColumn(measure, ratio) for measure in measures for ratio in (False, True))
        return cls(comparison.baseline, columns, tuple(rows))

    def keys(self) -> tuple[str, ...]:
        return (SETTING, *(column.key for column in self.columns))

    def sorted(self, key: str, descending: bool = False) -> FigureTable:
        """Return the table sorted by the column `key`, stably, with missing figures last; unsorted for an unknown
        key."""
        if key not in self.keys():
            return self
        place = self.keys().index(key) - 1
        cells = [(row.label if place < 0 else row.figures[place], row) for row in self.rows]
        there: list[tuple[Any, FigureRow]] = [(cell, row) for cell, row in cells if cell is not None]
        there.sort(key=lambda pair: pair[0], reverse=descending)  # stable, either way
        rows = *(row for _, row in there), *(row for cell, row in cells if cell is None)
        return replace(self, rows=rows)

    def csv(self) -> str:
        """Return the table as CSV in full precision, with units in the headings and empty cells for missing figures."""
        headings = [SETTING, *(column.heading for column in self.columns)]
        return Table("", [[row.label, *row.figures] for row in self.rows], headings).csv()


def known(value: float | None) -> float | None:
    """Return a figure unchanged, or None if it is not a finite number."""
    return value if value is not None and math.isfinite(value) else None


def swept_settings(groups: Sequence[RepeatedRuns]) -> tuple[str, ...]:
    """Return the numeric settings that differ between the groups, except seeds; the one with most values comes
    first."""
    values: dict[str, set[float]] = {}
    for group in groups:
        for name, value in group.runs[0].settings.items():
            if _is_number(value) and not _is_seed(name):
                values.setdefault(name, set()).add(value)
    swept = [name for name, each in values.items() if len(each) > 1]
    return tuple(sorted(swept, key=lambda name: -len(values[name])))


def sweep_lines(groups: Sequence[RepeatedRuns], swept: str, measure: str) -> tuple[Series, ...]:
    """Return the lines of a measure over the setting `swept`, one line for each combination of the other settings that
    differ.

    Groups without the setting or the measure are left out.
    """
    other = [name for name in _differing(groups) if name != swept]
    series: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        x, y = group.runs[0].settings.get(swept), known(group.value(measure))
        if _is_number(x) and y is not None:
            mine = _all_settings(group)
            label = " ".join(f"{name}={mine[name]}" for name in other if name in mine)
            series.setdefault(label, []).append((float(x), y))
    return tuple(Series(label, tuple(sorted(points))) for label, points in series.items())


def _differing(groups: Sequence[RepeatedRuns]) -> list[str]:
    values: dict[str, set[str]] = {}
    for group in groups:
        for name, value in _all_settings(group).items():
            values.setdefault(name, set()).add(str(value))
    return [name for name, each in values.items() if len(each) > 1 and not _is_seed(name)]


def _all_settings(group: RepeatedRuns) -> dict[str, object]:
    return {**group.runs[0].settings, **group.runs[0].environment}


def _is_seed(name: str) -> bool:
    return name.split(".")[-1] == SEED


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
