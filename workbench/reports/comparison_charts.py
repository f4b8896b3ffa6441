"""Draw charts of a comparison: ratios with intervals, two measures with the Pareto front, measures over a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.errors import WorkbenchError
from workbench.figures.bars import VERDICTS, IntervalBar, intervals
from workbench.figures.figure import Figure, beside
from workbench.figures.lines import Series, lines
from workbench.figures.points import Point, points, spread_axis
from workbench.measure.chart import axis_title
from workbench.runs.comparison import Comparison, ComparisonRow
from workbench.runs.measures import direction, parse_objective
from workbench.svg import Axis
from workbench.units import format_percent

WIDTH = 560  # width of a plot in pixels
MIN_LINES_WIDTH = 300  # width in pixels of each of several line plots
BETTER = {"min": " (less is better)", "max": " (more is better)"}


def ratio_figure(comparison: Comparison, measures: Sequence[str] = (), width: float = WIDTH) -> Figure:
    """Draw each run's ratio to the baseline with its confidence interval: a plot for each measure, a line for each run.

    Raises WorkbenchError if no ratio exists."""
    plots, without = [], []
    rows = [row for row in comparison.rows if not measures or row.measure in measures]
    for name in dict.fromkeys(row.measure for row in rows):
        mine = [row for row in rows if row.measure == name]
        without += [f"{row.label}: {name}" for row in mine if row.ratio is None]
        found = [
            IntervalBar(
                row.label,
                row.ratio,
                row.ratio_low,
                row.ratio_high,
                row.verdict if row.verdict in VERDICTS else "not sure",
                _describe_row(row),
            )
            for row in mine
            if row.ratio is not None
        ]
        if found:
            words = f"{name}{BETTER.get(direction(name) or '', '')}"
            plots.append(intervals(found, Axis("", log=True), words, width=width, legend=not plots))
    if not rows:
        raise WorkbenchError("no measure is chosen")
    if not plots:
        raise WorkbenchError("no ratio to draw: a value is 0 or negative; the table has the differences")
    notes = ["values as multiples of the baseline's", confidence_note(comparison)]
    if without:
        notes.append(f"no ratio, because a value is 0 or negative: {', '.join(without)}")
    return beside(plots, f"against {comparison.baseline}", columns=1, notes=notes)


def front_figure(comparison: Comparison, x: str, y: str, width: float = WIDTH) -> Figure:
    """Draw the runs by two measures (`NAME`, `NAME:min` or `NAME:max`). The Pareto front is green and joined."""
    rows = comparison.pareto(x, y)
    (across, x_way), (up, y_way) = parse_objective(x), parse_objective(y)
    found = [Point(str(row["label"]), row[across], row[up], front=row["front"]) for row in rows]
    return points(
        found,
        spread_axis(f"{axis_title(across)}{BETTER[x_way]}", [each.x for each in found]),
        spread_axis(f"{axis_title(up)}{BETTER[y_way]}", [each.y for each in found]),
        f"{up} against {across}: no run beats a green one in both",
        width=width,
        height=340,
        step="step-after" if x_way == "min" else "step-before",  # the corner of the region that a point dominates
    )


def lines_figure(measures: Mapping[str, Sequence[Series]], swept: str, width: float = WIDTH) -> Figure:
    """Draw each of `measures` over a swept setting, with one line for each combination of the other settings. Raises
    WorkbenchError without measures.
    """
    if not measures:
        raise WorkbenchError("no measure is chosen")
    columns = max(1, min(len(measures), int(width // MIN_LINES_WIDTH)))
    plots = []
    for name, series in measures.items():
        places = [place for each in series for place, _ in each.points] or [1.0]
        values = [value for each in series for _, value in each.points] or [1.0]
        heading = axis_title(name)
        words = f"{heading}{BETTER.get(direction(name) or '', '')}"
        words = words if any(each.points for each in series) else f"{words}: no run with this setting has the measure"
        across, up = spread_axis(swept, places), spread_axis("", values)
        plots.append(lines(series, across, up, words, width=width / columns - 80, height=150))
    return beside(plots, columns=columns)


def confidence_note(comparison: Comparison) -> str:
    """Return one line of text with the confidence level and the number of repetitions behind the intervals."""
    known = [row for row in comparison.rows if row.confidence is not None]
    if not known:
        return "one repetition of each run: no intervals"
    sure = sorted({format_percent(row.confidence) for row in known})
    times = sorted({f"{row.repetitions}" for row in known}, key=int)
    paired = " measured in turn" if all(row.paired for row in known) else ""
    return f"lines: {' or '.join(sure)} intervals of the median of {' or '.join(times)} repetitions{paired}"


def _describe_row(row: ComparisonRow) -> str:
    sure = "one repetition: no interval" if row.confidence is None else f"{format_percent(row.confidence)} interval"
    between = "" if row.ratio_low is None else f" [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
    apart = "" if row.difference_low is None else f" [{row.difference_low:+.4g}, {row.difference_high:+.4g}]"
    return (
        f"{row.label}\n{row.measure} {row.value:.4g}, the baseline's {row.baseline:.4g}\nratio {row.ratio:.3f}{between}"
        f"\ndifference {row.difference:+.4g}{apart}\n{sure}; repeated {row.repetitions}, the baseline "
        f"{row.baseline_repetitions}{', in turn' if row.paired else ''}"
    )
