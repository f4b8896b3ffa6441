"""Altair charts of a comparison: ratios with intervals, or two measures with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.measure.chart import DOMINATED_COLOR, FRONTIER_COLOR, import_altair, place_labels
from workbench.runs.comparison import Comparison
from workbench.runs.measures import direction, parse_objective
from workbench.svg import Scale

WORSE, UNSURE = "#b3541e", "#6b6b6b"
COLORS = {"better": FRONTIER_COLOR, "worse": WORSE, "not sure": UNSURE}
WIDTH, HEIGHT, ROW_HEIGHT = 560, 340, 26  # pixels: of a plot, and of one run's row of ratios
BETTER = {"min": " (less is better)", "max": " (more is better)"}
LOG_AXIS_RATIO = 10.0  # a larger ratio of largest to smallest value makes the axis logarithmic


def ratio_chart(comparison: Comparison) -> Any:
    """Draw each run's ratio to the baseline with its interval: one panel a measure, one line a run."""
    altair = import_altair()
    panels = []
    for name in dict.fromkeys(row.measure for row in comparison.rows):
        values = [
            {"label": row.label, "ratio": ratio, "low": row.ratio_low or ratio, "high": row.ratio_high or ratio,
             "label_text": f"{ratio:.{2 if abs(ratio - 1) > 0.02 else 4}f}",
             "verdict": row.verdict if row.verdict in COLORS else "not sure"}
            for row in comparison.rows
            if row.measure == name and (ratio := row.ratio) is not None
        ]  # fmt: skip
        if not values:
            continue
        ends = [1.0, *(each[end] for each in values for end in ("low", "high"))]
        domain = _axis_range(min(ends), max(ends), log=True)
        base = altair.Chart(altair.Data(values=values)).encode(
            y=altair.Y("label:N", title=None, sort=[v["label"] for v in values], axis=altair.Axis(labelLimit=420)),
            color=altair.Color("verdict:N", title=None, scale=altair.Scale(
                domain=list(COLORS), range=list(COLORS.values()))),
        )  # fmt: skip
        scale = altair.Scale(type="log", domain=list(domain), nice=False)
        ticks = altair.Axis(values=Scale(*domain, 0, WIDTH, True).ticks(), format="~g")
        better = BETTER.get(direction(name) or "", "")
        x = altair.X("ratio:Q", title=f"{name}, as a multiple of the baseline's{better}", scale=scale, axis=ticks)
        line = base.mark_rule(strokeWidth=3).encode(x=altair.X("low:Q", scale=scale, axis=ticks), x2="high:Q")
        dots = base.mark_point(filled=True, size=80, opacity=1).encode(x=x)
        words = base.mark_text(dy=-9, fontSize=10).encode(x=x, text="label_text:N")
        one = altair.Chart(altair.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 3], color="#333333")
        panel = altair.layer(one.encode(x=altair.X("one:Q", scale=scale)), line, dots, words)
        panels.append(panel.properties(width=WIDTH, height=ROW_HEIGHT * len(values) + 12))
    if not panels:
        raise WorkbenchError("no ratio to draw: a value is 0 or below; take --format table for the differences")
    title = altair.TitleParams(f"against {comparison.baseline}", subtitle=confidence_note(comparison))
    return altair.vconcat(*panels).properties(title=title)


def pareto_chart(comparison: Comparison, x: str, y: str) -> Any:
    """Draw the runs at two measures; the Pareto front is joined and green."""
    altair = import_altair()
    rows = comparison.pareto(x, y)
    (across, x_way), (up, y_way) = parse_objective(x), parse_objective(y)
    scales = _scale([row[across] for row in rows], 0, WIDTH), _scale([row[up] for row in rows], HEIGHT, 0)
    values = [{"label": row["label"], "x": row[across], "y": row[up], "front": row["front"]} for row in rows]
    pixels = [(scales[0](row[across]), scales[1](row[up])) for row in rows]
    forms = ["~s" if scale.high >= 1e4 else "~g" for scale in scales]
    axes = [
        altair.Axis(values=scale.ticks(), format=form) if scale.log else altair.Axis(format=form)
        for form, scale in zip(forms, scales, strict=True)
    ]
    places = [
        channel(f"{field}:Q", title=f"{name}{BETTER[way]}", axis=axis,
                scale=altair.Scale(type="log" if s.log else "linear", domain=[s.low, s.high], nice=False))
        for channel, field, name, way, axis, s in (
            (altair.X, "x", across, x_way, axes[0], scales[0]), (altair.Y, "y", up, y_way, axes[1], scales[1]))
    ]  # fmt: skip
    everything = altair.Chart(altair.Data(values=values)).encode(*places)
    dots = everything.mark_point(filled=True, size=80, opacity=1).encode(
        color=altair.condition("datum.front", altair.value(FRONTIER_COLOR), altair.value(DOMINATED_COLOR))
    )
    step = "step-after" if x_way == "min" else "step-before"  # the corner of the region that a point dominates
    joined = everything.transform_filter("datum.front").mark_line(color=FRONTIER_COLOR, strokeWidth=1, interpolate=step)
    names = [
        altair.Chart(altair.Data(values=[value]))
        .mark_text(align="right" if label.left else "left", dx=label.dx, dy=label.dy, fontSize=11)
        .encode(*places, text="label:N")
        for value, label in zip(values, place_labels(pixels, [row["label"] for row in rows], WIDTH), strict=True)
    ]
    shown = altair.layer(joined.encode(order=altair.Order("x:Q")), dots, *names)
    return shown.properties(width=WIDTH, height=HEIGHT, title=f"{up} against {across}: none beats the green")


def confidence_note(comparison: Comparison) -> str:
    """Describe in one line the confidence and the repetitions behind the intervals."""
    known = [row for row in comparison.rows if row.confidence is not None]
    if not known:
        return "one repetition of each: no intervals"
    sure = sorted({f"{row.confidence:.0%}" for row in known})
    times = sorted({f"{row.repetitions}" for row in known}, key=int)
    paired = " measured in turn" if all(row.paired for row in known) else ""
    return f"lines: {' or '.join(sure)} intervals of the median of {' or '.join(times)} repetitions{paired}"


def _scale(values: Sequence[float], begin: float, end: float) -> Scale:
    least, most = min(values), max(values)
    log = least > 0 and most / least > LOG_AXIS_RATIO
    return Scale(*_axis_range(least, most, log), begin, end, log)


def _axis_range(least: float, most: float, log: bool) -> tuple[float, float]:
    """Return the ends of an axis, a little beyond the values."""
    if log:
        wide = max(math.log(most / least), 0.02)
        return least * math.exp(-0.12 * wide), most * math.exp(0.12 * wide)
    wide = (most - least) or abs(most) or 1.0
    return least - 0.12 * wide, most + 0.2 * wide
