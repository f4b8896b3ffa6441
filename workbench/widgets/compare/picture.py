"""Draw runs beside a baseline: ratios with their intervals, or two measures with their Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workbench import svg
from workbench.measure.chart import place_labels
from workbench.reports.comparison_charts import confidence_note
from workbench.runs.comparison import Comparison, ComparisonRow
from workbench.runs.measures import direction, parse_objective
from workbench.svg import CHARACTER_WIDTH, Axis, Scale, format_tick, truncate_to_width
from workbench.widgets.flow import paragraph

WIDTH, LINE = 760, 22
LABEL_CHARACTER = CHARACTER_WIDTH * 12 / 11  # pixels at font size 12
LABEL, NUMBERS = 260, 230  # pixels at most for a run's label, and for the ratio and its interval in figures
PLOT, NAMES = (74, 16, 300), 230  # left, top and bottom of the plot of two measures; pixels beside it
BETTER = {"min": "less is better", "max": "more is better"}
DECADE = 10.0


def draw_ratios(comparison: Comparison, measures: Sequence[str] = (), width: float = WIDTH) -> str:
    """A panel a measure, a line a run: its ratio to the baseline with its interval, and what that says."""
    rows = [row for row in comparison.rows if not measures or row.measure in measures]
    left = min(LABEL, 0.3 * width, max((LABEL_CHARACTER * len(row.label) for row in rows), default=0)) + 24
    parts = [svg.text(4, 16, truncate_to_width(f"against {comparison.baseline}", width - 8), font_weight="bold")]
    note = paragraph(confidence_note(comparison), 4, 33, 0.9 * width - 8, class_="faint")  # at font size 12
    parts += note
    top, stop = 29.0 + 15 * len(note), next((row for row in rows if row.ratio is not None), None)
    for name in dict.fromkeys(row.measure for row in rows):
        mine = [row for row in rows if row.measure == name]
        parts += _panel(name, mine, left, top, stop, width)
        top += 30 + LINE * len(mine) + 18
    if not rows:
        parts.append(svg.text(4, top + 14, "no measure is chosen"))
    return svg.document(width, top + (24 if not rows else 0), *parts, title=f"ratios to {comparison.baseline}")


def _panel(
    name: str,
    rows: Sequence[ComparisonRow],
    left: float,
    top: float,
    stop: ComparisonRow | None,
    width: float,
) -> Iterator[str]:
    better = BETTER.get(direction(name) or "", "which way is better is not known")
    yield svg.text(4, top + 14, f"{name} ({better})")
    known = [row for row in rows if row.ratio is not None]
    ends = [1.0, *(v for row in known for v in (row.ratio, row.ratio_low, row.ratio_high) if v is not None)]
    across = Scale.over([min(ends) / 1.02, max(ends) * 1.02], left, width - NUMBERS, Axis(name, log=True))
    bottom = top + 26 + LINE * len(rows)
    one = across(1.0)
    if known:
        yield svg.line(one, top + 20, one, bottom, stroke_dasharray="4 3")
    for tick in _ends(across) if known else ():
        yield svg.text(across(tick), bottom + 11, f"{tick:.3g}", class_="faint", text_anchor="middle", font_size=10)
    for index, row in enumerate(rows):
        y = top + 26 + LINE * index + LINE / 2
        yield svg.text(
            4, y + 4, truncate_to_width(row.label, (left - 18) * CHARACTER_WIDTH / LABEL_CHARACTER), tip=row.label
        )
        if row.ratio is None:
            yield svg.text(left, y + 4, f"difference {row.difference:+.4g}; no ratio of values at or below 0")
            continue
        if row.ratio_low is not None and row.ratio_high is not None:
            yield svg.line(across(row.ratio_low), y, across(row.ratio_high), y, stroke_width=3, stroke_opacity=0.55)
        reach = {"key": f"{name}:{row.label}", "tabindex": 0 if row is stop else -1}
        yield draw_mark(across(row.ratio), y, row.verdict, tip=_describe_row(row), **reach)
        yield svg.text(width - NUMBERS + 14, y + 4, _figures(row), tip=_describe_row(row))


def _ends(across: Scale) -> Iterator[float]:
    """Draw the axis labels below a panel: 1, and both ends where they do not overlap it."""
    yield 1.0
    yield from (end for end in (across.low, across.high) if abs(across(end) - across(1.0)) > 5 * CHARACTER_WIDTH)


def _figures(row: ComparisonRow) -> str:
    """The ratio, its interval where there is room for it, and what that says."""
    between = "" if row.ratio_low is None else f" [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
    label = f"{row.ratio:.3f}{between}  {_significance(row)}"
    return label if CHARACTER_WIDTH * len(label) <= NUMBERS - 14 else f"{row.ratio:.3f}  {_significance(row)}"


def _significance(row: ComparisonRow) -> str:
    return row.verdict or ("no interval" if row.confidence is None else "not sure")


def draw_mark(x: float, y: float, verdict: str | None, **attributes: object) -> str:
    """Draw better, worse, same or not significant: by shape, and by colour besides."""
    if verdict in ("better", "worse"):
        up = -1 if verdict == "better" else 1
        points = [(x - 6, y - 5 * up), (x + 6, y - 5 * up), (x, y + 6 * up)]
        return svg.polygon(points, class_="c2" if verdict == "better" else "c5", **attributes)
    if verdict == "same":
        return svg.rect(x - 5, y - 5, 10, 10, class_="c0", **attributes)
    return svg.circle(x, y, 5, class_="line", stroke_width=2, **attributes)


def draw_pareto(comparison: Comparison, x: str, y: str, width: float = WIDTH) -> str:
    """Every run at two measures (`NAME`, `NAME:min` or `NAME:max`); those that none beats are filled and joined."""
    rows = comparison.pareto(x, y)
    (across_name, across_way), (up_name, up_way) = parse_objective(x), parse_objective(y)
    left, top, right, bottom = PLOT[0], PLOT[1], width - NAMES, PLOT[2]
    across = _scale([row[across_name] for row in rows], left, right, across_name)
    up = _scale([row[up_name] for row in rows], bottom, top, up_name)
    points = [(across(row[across_name]), up(row[up_name])) for row in rows]
    x_title, y_title = Axis(_axis(across_name, across_way)), Axis(_axis(up_name, up_way))
    parts = [*svg.x_axis(across, x_title, top, bottom), *svg.y_axis(up, y_title, left, right)]
    front = sorted(point for row, point in zip(rows, points, strict=True) if row["front"])
    parts.append(svg.path(_corners(front, across_way == "min"), stroke_dasharray="3 2"))
    # The columns beside the plot are free for names that stand at its right edge.
    labels = place_labels(points, [_name(row) for row in rows], width)
    for index, (row, (a, b), label) in enumerate(zip(rows, points, labels, strict=True)):
        tip = f"{row['label']}\n{across_name} {format_tick(row[across_name])}\n{up_name} {format_tick(row[up_name])}"
        filled = {"class_": "c2"} if row["front"] else {"class_": "line", "stroke_width": 1.5}
        reach = {"key": str(row["label"]), "tabindex": 0 if index == 0 else -1}
        parts.append(svg.circle(a, b, 5, tip=tip, **reach, **filled))
        where = "end" if label.left else "start"
        parts.append(svg.text(a + label.dx, b + label.dy + 3, _name(row), text_anchor=where, font_size=11))
    title = f"{up_name} against {across_name}: none beats those that are filled"
    return svg.document(width, bottom + 44, *parts, title=title)


def _scale(values: Sequence[float], begin: float, end: float, name: str) -> Scale:
    return Scale.over(values, begin, end, Axis(name, log=min(values) > 0 and max(values) / min(values) > DECADE))


def _corners(front: Sequence[tuple[float, float]], less: bool) -> Iterator[tuple[float, float]]:
    """Return the corners of the Pareto front's step line."""
    for index, (x, y) in enumerate(front):
        if index:
            before = front[index - 1]
            yield (x, before[1]) if less else (before[0], y)
        yield x, y


def _axis(name: str, way: str) -> str:
    return f"{name} ({BETTER[way]})"


def _name(row: dict[str, object]) -> str:
    return truncate_to_width(str(row["label"]), 36 * CHARACTER_WIDTH)


def _describe_row(row: ComparisonRow) -> str:
    sure = "one repetition: no interval" if row.confidence is None else f"{row.confidence:.0%} interval"
    between = "" if row.ratio_low is None else f" [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
    apart = "" if row.difference_low is None else f" [{row.difference_low:+.4g}, {row.difference_high:+.4g}]"
    return (
        f"{row.label}\n{row.measure} {row.value:.4g}, the baseline's {row.baseline:.4g}\nratio {row.ratio:.3f}{between}"
        f"\ndifference {row.difference:+.4g}{apart}\n{sure}; repeated {row.repetitions}, the baseline "
        f"{row.baseline_repetitions}{', in turn' if row.paired else ''}"
    )
